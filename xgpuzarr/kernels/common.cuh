// What every kernel is built on: fixed-width integers, runs of memory that know their length, and byte order.
//
// The sources compile with NVRTC, so no header of the host is included. The same text compiles with g++ for the tests,
// which run it on the host under the address and undefined-behaviour sanitizers.
#ifndef XGPUZARR_COMMON_CUH
#define XGPUZARR_COMMON_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// The widest unit that one thread loads or stores at once.
struct alignas(16) u128 {
    u64 low, high;
};

#define XGZ_FN __host__ __device__ __forceinline__

// A run of memory that knows its length. Kernels reach memory only through it: a load outside gives zero, a store
// outside is dropped, so a wrong offset can never touch another buffer.
template <class T, class Size = i64>
struct Span {
    T* data;
    Size size;

    XGZ_FN bool holds(Size start, Size count) const {
        return start >= 0 && count >= 0 && start <= size && count <= size - start;
    }

    // The part [start, start + count), or an empty span where that is not inside.
    XGZ_FN Span part(Size start, Size count) const {
        return holds(start, count) ? Span{data + start, count} : Span{data, 0};
    }

    XGZ_FN T load(Size index) const { return index >= 0 && index < size ? data[index] : T(); }

    XGZ_FN void store(Size index, T value) const {
        if (index >= 0 && index < size) data[index] = value;
    }
};

typedef Span<const u8> Bytes;
typedef Span<u8> MutableBytes;
typedef Span<const i64> Column;

// One aligned unit at a byte offset. The caller has made sure of the alignment (see `alignment_of`), not of the bounds.
template <class Unit>
XGZ_FN Unit load_unit(Bytes bytes, i64 offset) {
    if (!bytes.holds(offset, sizeof(Unit))) return Unit();
    return *reinterpret_cast<const Unit*>(bytes.data + offset);
}

template <class Unit>
XGZ_FN void store_unit(MutableBytes bytes, i64 offset, Unit unit) {
    if (bytes.holds(offset, sizeof(Unit))) *reinterpret_cast<Unit*>(bytes.data + offset) = unit;
}

XGZ_FN u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }

// Largest power of two, at most 16, that divides every number whose bits were or-ed into `bits`.
XGZ_FN i32 alignment_of(u64 bits) {
    bits |= 16;
    return static_cast<i32>(bits & (~bits + 1));
}

XGZ_FN u16 reverse_bytes(u16 x) { return static_cast<u16>((x << 8) | (x >> 8)); }

XGZ_FN u32 reverse_bytes(u32 x) { return (x << 24) | ((x & 0x0000FF00u) << 8) | ((x >> 8) & 0x0000FF00u) | (x >> 24); }

XGZ_FN u64 reverse_bytes(u64 x) {
    return (static_cast<u64>(reverse_bytes(static_cast<u32>(x))) << 32) | reverse_bytes(static_cast<u32>(x >> 32));
}

XGZ_FN u64 reverse_words(u64 x, i32 word_nbytes) {
    if (word_nbytes == 8) return reverse_bytes(x);
    if (word_nbytes == 4) return (reverse_bytes(x) << 32) | (reverse_bytes(x) >> 32);
    if (word_nbytes == 2) return ((x & 0x00FF00FF00FF00FFull) << 8) | ((x >> 8) & 0x00FF00FF00FF00FFull);
    return x;
}

// Reverses the bytes of each word in a unit. Where the word is wider than the unit the whole unit is reversed, and
// `mirrored_unit` finds its place.
XGZ_FN u8 swap_unit(u8 x, i32) { return x; }
XGZ_FN u16 swap_unit(u16 x, i32 word_nbytes) { return word_nbytes >= 2 ? reverse_bytes(x) : x; }
XGZ_FN u32 swap_unit(u32 x, i32 word_nbytes) {
    if (word_nbytes >= 4) return reverse_bytes(x);
    return static_cast<u32>(reverse_words(x, word_nbytes));
}
XGZ_FN u64 swap_unit(u64 x, i32 word_nbytes) { return reverse_words(x, word_nbytes); }
XGZ_FN u128 swap_unit(u128 x, i32 word_nbytes) {
    return u128{reverse_words(x.low, word_nbytes), reverse_words(x.high, word_nbytes)};
}

// Index of the unit that unit `index` of a run comes from, when words of `word_nbytes` are reversed.
XGZ_FN i64 mirrored_unit(i64 index, i32 word_nbytes, i32 unit_nbytes) {
    return word_nbytes <= unit_nbytes ? index : index ^ (word_nbytes / unit_nbytes - 1);
}

// Byte i of a guard zone. It changes with i, so a decoder that overruns with one repeated byte is seen.
XGZ_FN u8 guard_byte(i64 i) { return static_cast<u8>(0xA5 + 37 * i); }

// Says that a launch met something outside its buffers. Every writer writes the same value, so no atomic is needed.
XGZ_FN void report(Span<i32> status, i32 code) { status.store(0, code); }

XGZ_FN i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

XGZ_FN i64 larger(i64 a, i64 b) { return a < b ? b : a; }

XGZ_FN i64 round_up(i64 value, i64 multiple) { return (value + multiple - 1) / multiple * multiple; }

// Little-endian integers at any alignment.
XGZ_FN u32 load_u16(Bytes bytes, i64 at) { return bytes.load(at) | bytes.load(at + 1) << 8; }
XGZ_FN u32 load_u32(Bytes bytes, i64 at) { return load_u16(bytes, at) | load_u16(bytes, at + 2) << 16; }
XGZ_FN u64 load_u64(Bytes bytes, i64 at) {
    return load_u32(bytes, at) | static_cast<u64>(load_u32(bytes, at + 4)) << 32;
}

// Copies equally long runs, thread `first` of `stride` threads doing its share. The destination is written in aligned
// words; a source that is not aligned with it is read in aligned words too, two to each word written.
XGZ_FN void copy_run(Bytes source, MutableBytes out, i64 first, i64 stride) {
    const i64 head = smaller(out.size, static_cast<i64>((0 - address_of(out.data)) & 15));
    const i64 shift = static_cast<i64>((address_of(source.data) + head) & 7);
    if (((address_of(source.data) + head) & 15) == 0) {
        const i64 n_units = (out.size - head) / 16;
        for (i64 i = first; i < n_units; i += stride) {
            store_unit<u128>(out, head + 16 * i, load_unit<u128>(source, head + 16 * i));
        }
        for (i64 i = first; i < head; i += stride) out.store(i, source.load(i));
        for (i64 i = head + 16 * n_units + first; i < out.size; i += stride) out.store(i, source.load(i));
        return;
    }
    // Words whose two source words both lie inside the run; the bytes before and after go one by one.
    const i64 start = head + (shift > head ? 8 : 0);
    const i64 n_words = out.size - start >= 16 ? (out.size - start - 8) / 8 : 0;
    for (i64 i = first; i < n_words; i += stride) {
        const i64 at = start + 8 * i - shift;
        const u64 low = load_unit<u64>(source, at);
        const u64 word = shift == 0 ? low : (low >> (8 * shift)) | (load_unit<u64>(source, at + 8) << (64 - 8 * shift));
        store_unit<u64>(out, start + 8 * i, word);
    }
    for (i64 i = first; i < smaller(start, out.size); i += stride) out.store(i, source.load(i));
    for (i64 i = start + 8 * n_words + first; i < out.size; i += stride) out.store(i, source.load(i));
}

#endif
