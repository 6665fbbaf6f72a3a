// Decoder of the byte-oriented LZ formats: LZ4 blocks, Snappy and BloscLZ. One warp a stream. Each sequence is checked
// against both buffers before its first byte is copied, so no stream can lead outside them.
//
// Sources: lz4's lz4_Block_format.md; snappy's format_description.txt; for BloscLZ, which has no written specification,
// the streams that c-blosc 1.21 writes.
//
// All three are lists of sequences: literals, then a match. Most are a few bytes long, and each says where the next one
// starts, so that they can only be found one after the other; as little as possible may stand between two of them:
//
// 1. Every lane reads the sequence that would start at its byte of the next 32. Those that do start there are found by
//    walking from one to the next, without any memory access.
// 2. Sums of their lengths say where their bytes go, so all lanes can work on any of them: a row of 32 decoded bytes at
//    a time, each lane finds where its byte comes from. Bytes that come from the row itself are traced back until they
//    do not, and the row is copied at once.
//
// The lanes of a warp are threads on a device. On the host, one thread runs all of them in turn, step by step, so the
// same steps are tested there.
#ifndef XGPUZARR_LZ_CUH
#define XGPUZARR_LZ_CUH

#include "frames.cuh"

enum LzFormat { LZ_BLOSCLZ, LZ_LZ4, LZ_SNAPPY };

// Positions in a stream take 32 bits: half the arithmetic of 64. Lengths that a stream states stop at LONGEST, which is
// more than any stream holds, and the sum of two fits.
enum { MAX_STREAM_NBYTES = 0x3FFFFF00, LONGEST = MAX_STREAM_NBYTES };
typedef Span<const u8, i32> Stream;
typedef Span<u8, i32> MutableStream;

// ---- lanes ----------------------------------------------------------------------------------------------------------

enum { N_LANES = 32 };

// The lanes that a thread runs: [first, end), none on the host but in the first thread of a warp. A loop shared by all
// lanes goes from `first` in steps of `stride`.
struct Lanes {
    i32 first, end, stride;

    // Makes what every lane has written visible to all.
    XGZ_FN void sync() const {
#ifdef __CUDA_ARCH__
        __syncwarp();
#endif
    }
};

XGZ_FN Lanes lanes_of(i32 thread) {
    const i32 lane = thread % N_LANES;
#ifdef __CUDA_ARCH__
    return Lanes{lane, lane + 1, N_LANES};
#else
    return Lanes{0, lane == 0 ? N_LANES : 0, 1};
#endif
}

// A number of each lane. A lane reads and writes its own by [lane]; the functions are for all lanes together.
struct PerLane {
#ifdef __CUDA_ARCH__
    i32 own;

    XGZ_FN i32& operator[](i32) { return own; }
    XGZ_FN void set(i32 lane, i32 number) {
        if (threadIdx.x % N_LANES == lane) own = number;
    }
    XGZ_FN i32 of(i32 lane) const { return __shfl_sync(0xFFFFFFFFu, own, lane); }
    XGZ_FN PerLane at(PerLane lanes) const { return {__shfl_sync(0xFFFFFFFFu, own, lanes.own)}; }
    XGZ_FN bool any() const { return __any_sync(0xFFFFFFFFu, own); }
    XGZ_FN u32 bits() const {
#if __CUDA_ARCH__ >= 800
        return __reduce_or_sync(0xFFFFFFFFu, static_cast<u32>(own));
#else
        u32 found = static_cast<u32>(own);
        for (i32 step = 1; step < N_LANES; step *= 2) found |= __shfl_xor_sync(0xFFFFFFFFu, found, step);
        return found;
#endif
    }
    XGZ_FN PerLane sums() const {
        i32 sum = own;
        for (i32 step = 1; step < N_LANES; step *= 2) {
            const i32 before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
            if (threadIdx.x % N_LANES >= step) sum += before;
        }
        return {sum};
    }
#else
    i32 all[N_LANES];

    i32& operator[](i32 lane) { return all[lane]; }
    void set(i32 lane, i32 number) { all[lane] = number; }
    // The number of one lane, for all.
    i32 of(i32 lane) const { return all[lane]; }
    // For each lane, the number of the lane that `lanes` names.
    PerLane at(const PerLane& lanes) const {
        PerLane result;
        for (i32 lane = 0; lane < N_LANES; ++lane) result.all[lane] = all[lanes.all[lane] % N_LANES];
        return result;
    }
    // True if a number is not 0.
    bool any() const { return bits() != 0; }
    // All numbers, or-ed.
    u32 bits() const {
        u32 found = 0;
        for (i32 number : all) found |= static_cast<u32>(number);
        return found;
    }
    // For each lane, the sum of the numbers up to and with its own.
    PerLane sums() const {
        PerLane result;
        i32 sum = 0;
        for (i32 lane = 0; lane < N_LANES; ++lane) result.all[lane] = sum += all[lane];
        return result;
    }
#endif
};

XGZ_FN i32 count_bits(u32 bits) {
#ifdef __CUDA_ARCH__
    return __popc(bits);
#else
    return __builtin_popcount(bits);
#endif
}

// ---- sequences ------------------------------------------------------------------------------------------------------

// Encoded bytes being read. It stops at the end; reading on gives zeros and is a fault. So is a length that goes on for
// more than `patience` bytes.
struct Cursor {
    Stream in;
    i32 at, patience;
    bool fault;

    XGZ_FN bool at_end() const { return at >= in.size; }
    XGZ_FN u32 next() {
        fault |= at_end();
        return in.load(at_end() ? at : at++);
    }
    XGZ_FN void skip(i32 count) {
        fault |= !in.holds(at, count);
        if (!fault) at += count;
    }
};

// A length below 32 bits wide, however often a stream adds to it.
XGZ_FN i32 capped(u64 length) { return length < LONGEST ? static_cast<i32>(length) : static_cast<i32>(LONGEST); }

// A length that goes on: bytes are added until one is not 255.
XGZ_FN i32 extended(i32 length, Cursor* cursor) {
    u64 sum = static_cast<u64>(length);
    u32 byte = 255;
    for (i32 i = 0; byte == 255 && !cursor->fault; ++i) {
        sum += byte = cursor->next();
        cursor->fault |= i == cursor->patience;
    }
    return capped(sum);
}

// Literals that stand at `literals_at` in the encoded bytes, then a match: `length` bytes that start `distance` back.
struct Sequence {
    i32 literals_at, literals, distance, length;
};

// The last sequence of an LZ4 block ends after its literals; a block that ends with a match was cut.
XGZ_FN Sequence next_lz4(Cursor* cursor) {
    const i32 token = static_cast<i32>(cursor->next());
    i32 literals = token >> 4;
    if (literals == 15) literals = extended(literals, cursor);
    Sequence sequence{cursor->at, literals, 0, 0};
    cursor->skip(literals);
    if (cursor->at_end()) return sequence;
    sequence.distance = static_cast<i32>(cursor->next());
    sequence.distance |= static_cast<i32>(cursor->next() << 8);
    sequence.length = token & 15;
    if (sequence.length == 15) sequence.length = extended(sequence.length, cursor);
    sequence.length += 4;
    cursor->fault |= cursor->at_end();
    return sequence;
}

XGZ_FN Sequence next_snappy(Cursor* cursor) {
    const u32 tag = cursor->next(), kind = tag & 3, high = tag >> 2;
    const u32 extra_nbytes = kind == 0 ? (high < 60 ? 0 : high - 59) : kind == 3 ? 4 : kind;
    u64 extra = 0;
    for (u32 i = 0; i < extra_nbytes; ++i) extra |= static_cast<u64>(cursor->next()) << (8 * i);
    if (kind == 0) {
        const Sequence sequence{cursor->at, capped((extra_nbytes ? extra : high) + 1), 0, 0};
        cursor->skip(sequence.literals);
        return sequence;
    }
    if (kind == 1) return Sequence{0, 0, static_cast<i32>((high >> 3) << 8 | extra), static_cast<i32>(high & 7) + 4};
    return Sequence{0, 0, capped(extra), static_cast<i32>(high) + 1};
}

// The first byte of a stream is always a run of literals; its top three bits mean nothing.
XGZ_FN Sequence next_blosclz(Cursor* cursor) {
    const bool first = cursor->at == 0;
    const i32 control = static_cast<i32>(first ? cursor->next() & 31 : cursor->next());
    if (control < 32) {
        const Sequence sequence{cursor->at, control + 1, 0, 0};
        cursor->skip(sequence.literals);
        return sequence;
    }
    i32 length = (control >> 5) + 2;
    if (length == 9) length = extended(length, cursor);
    i32 distance = (control & 31) << 8 | static_cast<i32>(cursor->next());
    if (distance == 8191) {  // further back than 13 bits say
        distance += static_cast<i32>(cursor->next() << 8);
        distance += static_cast<i32>(cursor->next());
    }
    return Sequence{0, 0, distance + 1, length};
}

template <LzFormat FORMAT>
XGZ_FN Sequence next_sequence(Cursor* cursor) {
    if (FORMAT == LZ_LZ4) return next_lz4(cursor);
    return FORMAT == LZ_SNAPPY ? next_snappy(cursor) : next_blosclz(cursor);
}

// ---- copies ---------------------------------------------------------------------------------------------------------

enum { WIDE_COPY_NBYTES = 512 };  // from here on, a copy of its own is faster than rows

// Copies bytes that do not overlap, all lanes together. Not inlined: it would take registers from what is.
__host__ __device__ __noinline__ void copy_part(Stream from, i32 start, MutableStream out, i32 to, i32 count, Lanes lanes) {
    const Stream source = from.part(start, count);
    const MutableStream dest = out.part(to, count);
    copy_run({source.data, source.size}, {dest.data, dest.size}, lanes.first, lanes.stride);
}

// Where a match overlaps what it writes, the `distance` bytes before it repeat. First as many of them as make a wide
// copy, then copies of all there is so far, twice as much each time.
XGZ_FN void copy_match(MutableStream out, i32 at, i32 distance, i32 length, Lanes lanes) {
    const Stream written{out.data, out.size};
    const i32 from = at - distance, end = at + length;
    if (length > distance && distance < WIDE_COPY_NBYTES) {
        const i32 first = static_cast<i32>(smaller(length, WIDE_COPY_NBYTES / distance * distance));
        for (i32 i = lanes.first; i < first; i += lanes.stride) out.store(at + i, written.load(from + i % distance));
        at += first;
        lanes.sync();
    }
    while (at < end) {
        const i32 available = length <= distance ? length : (at - from) / distance * distance;
        const i32 part = static_cast<i32>(smaller(end - at, available));
        copy_part(written, from, out, at, part, lanes);
        at += part;
        lanes.sync();
    }
}

// Sequences, one a lane, in the order of the stream. `end` is where each one's bytes end, counted from the first one's
// first byte.
struct Sequences {
    i32 count;
    PerLane literals_at, literals, distance, length, end;

    // True if all lie inside the buffers, when `done` bytes are decoded before them and there is room for `room` more.
    XGZ_FN bool fit(i32 done, i32 room, Lanes lanes) {
        PerLane is_wrong;
        for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
            const bool is_far = distance[lane] < 1 || distance[lane] - (end[lane] - length[lane]) > done;
            is_wrong[lane] = lane < count && (end[lane] > room || (length[lane] > 0 && is_far));
        }
        return !is_wrong.any();
    }
};

// Decoded bytes on their way out. Those of the last row are still being loaded.
struct Output {
    Stream in;
    MutableStream out;
    Lanes lanes;
    i32 at, row, row_nbytes;  // bytes decoded so far; where the last row starts, and its bytes
    PerLane value;            // of the last row

    // Writes the last row, so that all before `at` can be read.
    XGZ_FN void settle() {
        for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
            if (lane < row_nbytes) out.data[row + lane] = static_cast<u8>(value[lane]);
        }
        row_nbytes = 0;
        lanes.sync();
    }

    // Copies the bytes of sequences that fit, row by row. What a row's loads wait for is not needed before the next row.
    XGZ_FN void add(Sequences& sequences) {
        const i32 nbytes = sequences.end.of(sequences.count - 1);
        i32 n_started = 0;
        for (i32 begin = 0; begin < nbytes; begin += N_LANES) {
            PerLane mark, index, source;
            for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
                const i32 start = sequences.end[lane] - sequences.literals[lane] - sequences.length[lane] - begin;
                mark[lane] = lane < sequences.count && start >= 0 && start < N_LANES ? static_cast<i32>(1u << start) : 0;
            }
            const u32 starts = mark.bits();
            for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
                index[lane] = n_started - 1 + count_bits(starts & (0xFFFFFFFFu >> (N_LANES - 1 - lane)));
            }
            n_started += count_bits(starts);
            PerLane end = sequences.end.at(index), length = sequences.length.at(index);
            PerLane literals = sequences.literals.at(index), literals_at = sequences.literals_at.at(index);
            PerLane distance = sequences.distance.at(index);
            for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
                const i32 left = end[lane] - length[lane] - begin - lane;  // literals from this byte on
                source[lane] = left > 0 ? -1 - (literals_at[lane] + literals[lane] - left)
                                        : at + lane - distance[lane];
            }
            load_row(source, static_cast<i32>(smaller(N_LANES, nbytes - begin)));
        }
    }

    // Starts to load a row, from an offset in `out` for each byte, or -1 minus an offset in `in`.
    XGZ_FN void load_row(PerLane source, i32 nbytes) {
        settle();
        PerLane index, is_inside;
        while (true) {  // each round traces twice as far back as the one before
            for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
                is_inside[lane] = lane < nbytes && source[lane] >= at;
                index[lane] = is_inside[lane] ? source[lane] - at : lane;
            }
            if (!is_inside.any()) break;
            source = source.at(index);
        }
        for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
            if (lane < nbytes) value[lane] = source[lane] < 0 ? in.data[-1 - source[lane]] : out.data[source[lane]];
        }
        row = at;
        row_nbytes = nbytes;
        at += nbytes;
    }

    // Copies one sequence that fits, of any length.
    XGZ_FN void add_long(const Sequences& sequences) {
        settle();
        const i32 literals = sequences.literals.of(0), length = sequences.length.of(0);
        if (literals > 0) copy_part(in, sequences.literals_at.of(0), out, at, literals, lanes);
        lanes.sync();
        at += literals;
        if (length > 0) copy_match(out, at, sequences.distance.of(0), length, lanes);
        at += length;
    }
};

// ---- streams --------------------------------------------------------------------------------------------------------

enum { SHORT_PATIENCE = 2 };  // bytes by which the length of a short sequence goes on

// Finds the sequences that start in the 32 bytes from *at on, and moves *at behind them. Stops before a long one. If
// `is_long`, finds the one at *at, whatever its length. Finds none if the first one is long, or wrong.
template <LzFormat FORMAT>
XGZ_FN Sequences find_sequences(Stream in, i32* at, bool is_long, Lanes lanes) {
    const i32 window = *at, limit = is_long ? 1 : static_cast<i32>(smaller(N_LANES, in.size - window));
    PerLane next, place;
    Sequences all, found;
    for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
        Cursor cursor{in, window + lane, is_long && lane == 0 ? in.size : static_cast<i32>(SHORT_PATIENCE), false};
        const Sequence sequence = next_sequence<FORMAT>(&cursor);
        const bool is_short = sequence.literals < WIDE_COPY_NBYTES && sequence.length < WIDE_COPY_NBYTES;
        next[lane] = !cursor.fault && (is_long || is_short) ? cursor.at - window : -1;
        all.literals_at[lane] = sequence.literals_at;
        all.literals[lane] = sequence.literals;
        all.distance[lane] = sequence.distance;
        all.length[lane] = sequence.length;
        place[lane] = 0;
    }
    i32 offset = 0;
    found.count = 0;
    while (offset < limit) {
        const i32 after = next.of(offset);
        if (after < 0) break;
        place.set(found.count++, offset);
        offset = after;
    }
    *at = window + offset;
    found.literals_at = all.literals_at.at(place);
    found.literals = all.literals.at(place);
    found.distance = all.distance.at(place);
    found.length = all.length.at(place);
    for (i32 lane = lanes.first; lane < lanes.end; ++lane) {
        const bool is_found = lane < found.count;
        found.end[lane] = is_found ? found.literals[lane] + found.length[lane] : 0;
    }
    found.end = found.end.sums();
    return found;
}

// Decodes a stream. Returns the decoded bytes, or -1 if the stream is cut, tells of more than `out` holds, or points
// before it.
template <LzFormat FORMAT>
XGZ_FN i32 decode_lz(Stream in, MutableStream out, Lanes lanes) {
    i32 at = 0;
    if (FORMAT == LZ_SNAPPY) {
        const SnappySize stated = load_snappy_size({in.data, in.size});
        if (stated.nbytes == 0 || stated.content_nbytes != static_cast<u64>(out.size)) return -1;
        at = static_cast<i32>(stated.nbytes);
    }
    Output output{in, out, lanes, 0, 0, 0, {}};
    bool is_long = false;
    while (at < in.size) {
        Sequences sequences = find_sequences<FORMAT>(in, &at, is_long, lanes);
        if (!sequences.fit(output.at, out.size - output.at, lanes)) return -1;
        if (sequences.count == 0) {
            if (is_long) return -1;
            is_long = true;
        } else if (is_long) {
            output.add_long(sequences);
            is_long = false;
        } else {
            output.add(sequences);
        }
    }
    output.settle();
    return output.at;
}

#endif
