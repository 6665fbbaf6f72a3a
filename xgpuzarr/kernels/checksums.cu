// Checksums of byte ranges, in parallel within each range: a thread does one segment, and what it finds is moved to
// where the segment stands and added to the range's total. That works because all but XXH64 are linear in the bytes.
//
// Sources: RFC 1950 (Adler-32); RFC 1952 and RFC 3720 (CRC-32 and CRC-32C, their polynomials reflected); HDF5's
// H5checksum.c for its Fletcher-32, which is of big-endian words; xxHash's xxhash_spec.md (XXH64).
#include "frames.cuh"

enum { SEGMENT_NBYTES = 1024 };

// The ranges, and which of them and which segment a piece of work is.
struct Ranges {
    Bytes buffer;
    Column offset, nbytes;
    i64 n_ranges;

    XGZ_FN Bytes range(i64 r) const { return buffer.part(offset.load(r), nbytes.load(r)); }
    XGZ_FN bool holds(i64 r) const { return range(r).size == nbytes.load(r); }
};

XGZ_FN u8 byte_of(u64 word, i64 at) { return static_cast<u8>(word >> (8 * at)); }

// Eight bytes at once where they are aligned; zeros behind the end.
XGZ_FN u64 load_8_bytes(Bytes bytes, i64 at) {
    if ((address_of(bytes.data + at) & 7) == 0 && bytes.holds(at, 8)) return load_unit<u64>(bytes, at);
    return load_u64(bytes, at);
}

// ---- sums: Adler-32 and Fletcher-32 ---------------------------------------------------------------------------------

// `x` modulo `modulus`, with `modulus` itself for its multiples other than 0: what folding carries back gives.
XGZ_FN u64 fold(u64 x, u64 modulus) { return x == 0 ? 0 : (x - 1) % modulus + 1; }

// Words w_0 ... w_(n-1) of a range: adds the sum of w_i and the sum of (n - i) w_i, folded, to sums[2 r] and sums[2 r +
// 1]. Words are bytes, or big-endian pairs of bytes, a single last byte the higher one.
extern "C" __global__ void weighted_sums(const u8* buffer, i64 buffer_nbytes, const i64* offset, const i64* nbytes,
                                         i64 n_ranges, i64 n_segments, i32 word_nbytes, u32 modulus, u64* sums,
                                         i32* status) {
    const Ranges ranges{{buffer, buffer_nbytes}, {offset, n_ranges}, {nbytes, n_ranges}, n_ranges};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 work = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; work < n_ranges * n_segments;
         work += stride) {
        const i64 r = work / n_segments;
        const Bytes range = ranges.range(r);
        if (!ranges.holds(r)) report({status, 1}, 1);
        for (i64 start = (work - r * n_segments) * SEGMENT_NBYTES; start < range.size;
             start += n_segments * SEGMENT_NBYTES) {
            const i64 stop = smaller(range.size, start + SEGMENT_NBYTES);
            u64 sum = 0, weighted = 0;
            for (i64 at = start; at < stop; at += 8) {
                const u64 eight = load_8_bytes(range, at);
                for (i64 i = 0; i < smaller(8, stop - at); i += word_nbytes) {
                    sum += word_nbytes == 1 ? byte_of(eight, i)
                                            : static_cast<u64>(byte_of(eight, i)) << 8 | byte_of(eight, i + 1);
                    weighted += sum;
                }
            }
            const u64 words_after = static_cast<u64>((range.size - stop + word_nbytes - 1) / word_nbytes);
            atomicAdd(sums + 2 * r, fold(sum, modulus));
            atomicAdd(sums + 2 * r + 1, fold(weighted + words_after % modulus * (sum % modulus), modulus));
        }
    }
}

// Makes checksums of the sums of `weighted_sums`, folded ones of the words' modulus: of bytes Adler-32, which starts
// its first sum with 1; of pairs of bytes Fletcher-32, where a multiple of the modulus shows as the modulus.
extern "C" __global__ void join_sums(const u64* sums, const i64* nbytes, i64 n_ranges, i32 word_nbytes, u32 modulus,
                                     u32* joined) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 r = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; r < n_ranges; r += stride) {
        const Span<const u64> both{sums, 2 * n_ranges};
        u64 low = both.load(2 * r), high = both.load(2 * r + 1);
        if (word_nbytes == 1) {
            low = (low + 1) % modulus;
            high = (high + static_cast<u64>(Column{nbytes, n_ranges}.load(r))) % modulus;
        } else {
            low = fold(low, modulus);
            high = fold(high, modulus);
        }
        Span<u32>{joined, n_ranges}.store(r, static_cast<u32>(high << 16 | low));
    }
}

// ---- remainders: CRC-32 and CRC-32C ---------------------------------------------------------------------------------

// Product of two polynomials modulo the reflected polynomial, the highest bit the constant term.
XGZ_FN u32 multiply(u32 a, u32 b, u32 polynomial) {
    u32 product = 0;
    for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? polynomial : 0);
    }
    return product;
}

// `remainder` as it is after `nbytes` zero bytes. powers[k] is x to the 8 * 2^k.
XGZ_FN u32 shift_remainder(u32 remainder, i64 nbytes, Span<const u32> powers, u32 polynomial) {
    for (i64 k = 0; nbytes >> k != 0; ++k) {
        if (nbytes >> k & 1) remainder = multiply(powers.load(k), remainder, polynomial);
    }
    return remainder;
}

// Adds the remainder of each range, started with all bits set and inverted at its end, to remainders[r]; that of
// nothing is 0.
extern "C" __global__ void crc_remainders(const u8* buffer, i64 buffer_nbytes, const i64* offset, const i64* nbytes,
                                          i64 n_ranges, i64 n_segments, u32 polynomial, const u32* powers, i64 n_powers,
                                          u32* remainders, i32* status) {
    const Ranges ranges{{buffer, buffer_nbytes}, {offset, n_ranges}, {nbytes, n_ranges}, n_ranges};
    const Span<const u32> table{powers, n_powers};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 work = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; work < n_ranges * n_segments;
         work += stride) {
        const i64 r = work / n_segments;
        const Bytes range = ranges.range(r);
        if (!ranges.holds(r)) report({status, 1}, 1);
        for (i64 start = (work - r * n_segments) * SEGMENT_NBYTES; start < range.size;
             start += n_segments * SEGMENT_NBYTES) {
            const i64 stop = smaller(range.size, start + SEGMENT_NBYTES);
            u32 remainder = start == 0 ? 0xFFFFFFFFu : 0;
            for (i64 at = start; at < stop; at += 8) {
                const u64 eight = load_8_bytes(range, at);
                for (i64 i = 0; i < smaller(8, stop - at); ++i) {
                    remainder ^= byte_of(eight, i);
                    for (i32 bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ (remainder & 1 ? polynomial : 0);
                }
            }
            const u32 inversion = start == 0 ? 0xFFFFFFFFu : 0;
            atomicXor(remainders + r, shift_remainder(remainder, range.size - stop, table, polynomial) ^ inversion);
        }
    }
}

// ---- XXH64 ----------------------------------------------------------------------------------------------------------

#define XXH_PRIME_1 0x9E3779B185EBCA87ull
#define XXH_PRIME_2 0xC2B2AE3D27D4EB4Full
#define XXH_PRIME_3 0x165667B19E3779F9ull
#define XXH_PRIME_4 0x85EBCA77C2B2AE63ull
#define XXH_PRIME_5 0x27D4EB2F165667C5ull

XGZ_FN u64 rotate(u64 x, i32 bits) { return x << bits | x >> (64 - bits); }

XGZ_FN u64 xxh_round(u64 lane, u64 word) { return rotate(lane + word * XXH_PRIME_2, 31) * XXH_PRIME_1; }

XGZ_FN u64 xxh_merge(u64 hash, u64 lane) { return (hash ^ xxh_round(0, lane)) * XXH_PRIME_1 + XXH_PRIME_4; }

// XXH64 of some bytes with seed 0.
XGZ_FN u64 xxh64(Bytes bytes) {
    u64 hash = XXH_PRIME_5;
    i64 at = 0;
    if (bytes.size >= 32) {
        u64 a = XXH_PRIME_1 + XXH_PRIME_2, b = XXH_PRIME_2, c = 0, d = 0 - XXH_PRIME_1;
        for (; at + 32 <= bytes.size; at += 32) {
            a = xxh_round(a, load_8_bytes(bytes, at));
            b = xxh_round(b, load_8_bytes(bytes, at + 8));
            c = xxh_round(c, load_8_bytes(bytes, at + 16));
            d = xxh_round(d, load_8_bytes(bytes, at + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = xxh_merge(xxh_merge(xxh_merge(xxh_merge(hash, a), b), c), d);
    }
    hash += static_cast<u64>(bytes.size);
    for (; at + 8 <= bytes.size; at += 8) {
        hash = rotate(hash ^ xxh_round(0, load_8_bytes(bytes, at)), 27) * XXH_PRIME_1 + XXH_PRIME_4;
    }
    if (at + 4 <= bytes.size) {
        hash = rotate(hash ^ load_u32(bytes, at) * XXH_PRIME_1, 23) * XXH_PRIME_2 + XXH_PRIME_3;
        at += 4;
    }
    for (; at < bytes.size; ++at) hash = rotate(hash ^ bytes.load(at) * XXH_PRIME_5, 11) * XXH_PRIME_1;
    hash = (hash ^ hash >> 33) * XXH_PRIME_2;
    hash = (hash ^ hash >> 29) * XXH_PRIME_3;
    return hash ^ hash >> 32;
}

// Compares the content of each Zstandard frame with the checksum at its end, which is the low 4 bytes of its XXH64 (RFC
// 8878, section 3.1.1); a frame that states another gives its chunk the problem `code`. Nothing is hashed for frames
// that state none, nor for chunks with a problem. One thread hashes a frame: each step needs the one before.
extern "C" __global__ void check_zstd_contents(const u8* encoded, i64 encoded_nbytes, const i64* frame_offset,
                                               const i64* frame_nbytes, const u8* buffer, i64 buffer_nbytes,
                                               const i64* offset, const i64* nbytes, i64 n_frames, i32 code,
                                               i32* problem, i32* status) {
    const Ranges frames{{encoded, encoded_nbytes}, {frame_offset, n_frames}, {frame_nbytes, n_frames}, n_frames};
    const Ranges contents{{buffer, buffer_nbytes}, {offset, n_frames}, {nbytes, n_frames}, n_frames};
    const Span<i32> problems{problem, n_frames};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 f = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; f < n_frames; f += stride) {
        const Bytes frame = frames.range(f);
        if (problems.load(f) != 0 || !load_zstd_header(frame).has_checksum) continue;
        if (!contents.holds(f)) report({status, 1}, 1);
        if (load_u32(frame, frame.size - 4) != static_cast<u32>(xxh64(contents.range(f)))) problems.store(f, code);
    }
}

// ---- comparison -----------------------------------------------------------------------------------------------------

// Compares the checksum of each range with the 4 bytes stored at stored_at[r]. A range that has another gives its chunk
// (chunk[r], or r where that is null) the problem `code`, unless skip[r] is not 0.
extern "C" __global__ void compare_checksums(const u32* found, const u8* buffer, i64 buffer_nbytes,
                                             const i64* stored_at, i32 is_big_endian, const i32* skip, const i64* chunk,
                                             i64 n_ranges, i32 code, i32* problem, i64 n_chunks) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 r = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; r < n_ranges; r += stride) {
        if (Span<const i32>{skip, n_ranges}.load(r) != 0) continue;
        const Bytes stored = Bytes{buffer, buffer_nbytes}.part(Column{stored_at, n_ranges}.load(r), 4);
        const u32 word = load_u32(stored, 0), expected = is_big_endian ? reverse_bytes(word) : word;
        if (stored.size != 4 || Span<const u32>{found, n_ranges}.load(r) != expected) {
            Span<i32>{problem, n_chunks}.store(chunk ? Column{chunk, n_ranges}.load(r) : r, code);
        }
    }
}
