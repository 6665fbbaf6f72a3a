// Decoder of the byte-oriented LZ formats: LZ4 blocks, Snappy and BloscLZ. One warp a stream, every byte
// bounds-checked.
//
// Sources: lz4's lz4_Block_format.md; snappy's format_description.txt; for BloscLZ, which has no written specification,
// the streams that c-blosc 1.21 writes.
//
// All three are lists of sequences: literals, then a match. Each format has a function that reads the next one; one
// loop copies. All lanes follow the same sequences and share out the bytes of each copy; on the host one lane does all.
#ifndef XGPUZARR_LZ_CUH
#define XGPUZARR_LZ_CUH

#include "common.cuh"

enum LzFormat { LZ_BLOSCLZ, LZ_LZ4, LZ_SNAPPY };

// Positions in a stream take 32 bits: half the arithmetic of 64. Lengths that a stream states stop at LONGEST, which is
// more than any stream holds.
enum { MAX_STREAM_NBYTES = 0x7FFFFF00, LONGEST = MAX_STREAM_NBYTES, WIDE_COPY_NBYTES = 512 };
typedef Span<const u8, i32> Stream;
typedef Span<u8, i32> MutableStream;

struct Lanes {
    i32 lane, count;

    // Makes what every lane has written visible to all.
    XGZ_FN void sync() const {
#ifdef __CUDA_ARCH__
        __syncwarp();
#endif
    }
};

XGZ_FN Lanes this_warp(i32 thread) {
#ifdef __CUDA_ARCH__
    return Lanes{thread & 31, 32};
#else
    return Lanes{thread & 31, 1};
#endif
}

// Encoded bytes being read. It stops at the end; reading on gives zeros and is a fault.
struct Cursor {
    Stream in;
    i32 at;
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
    while (byte == 255 && !cursor->fault) sum += byte = cursor->next();
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

XGZ_FN Sequence next_sequence(LzFormat format, Cursor* cursor) {
    if (format == LZ_LZ4) return next_lz4(cursor);
    return format == LZ_SNAPPY ? next_snappy(cursor) : next_blosclz(cursor);
}

// Copies bytes that do not overlap, all lanes together.
XGZ_FN void copy_part(Stream from, i32 start, MutableStream out, i32 to, i32 count, Lanes lanes) {
    if (count < WIDE_COPY_NBYTES) {
        for (i32 i = lanes.lane; i < count; i += lanes.count) out.store(to + i, from.load(start + i));
    } else {
        const Stream source = from.part(start, count);
        const MutableStream dest = out.part(to, count);
        copy_run({source.data, source.size}, {dest.data, dest.size}, lanes.lane, lanes.count);
    }
}

// Where a match overlaps what it writes, the `distance` bytes before it repeat. First as many of them as make a wide
// copy, then copies of all there is so far, twice as much each time.
XGZ_FN void copy_match(MutableStream out, i32 at, i32 distance, i32 length, Lanes lanes) {
    const Stream written{out.data, out.size};
    const i32 from = at - distance, end = at + length;
    if (length > distance && distance < WIDE_COPY_NBYTES) {
        const i32 first = static_cast<i32>(smaller(length, WIDE_COPY_NBYTES / distance * distance));
        for (i32 i = lanes.lane; i < first; i += lanes.count) out.store(at + i, written.load(from + i % distance));
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

// Decodes a stream. Returns the decoded bytes, or -1 if the stream is cut, tells of more than `out` holds, or points
// before it.
XGZ_FN i32 decode_lz(LzFormat format, Stream in, MutableStream out, Lanes lanes) {
    Cursor cursor{in, 0, false};
    if (format == LZ_SNAPPY) {  // starts with its decoded size, 7 bits a byte
        u64 stated = 0;
        u32 byte = 0x80;
        for (i32 shift = 0; shift < 35 && (byte & 0x80); shift += 7) {
            byte = cursor.next();
            stated |= static_cast<u64>(byte & 0x7F) << shift;
        }
        cursor.fault |= (byte & 0x80) || stated != static_cast<u64>(out.size);
    }
    i32 at = 0;
    while (!cursor.fault && !cursor.at_end()) {
        const Sequence sequence = next_sequence(format, &cursor);
        if (cursor.fault || sequence.literals > out.size - at) return -1;
        copy_part(in, sequence.literals_at, out, at, sequence.literals, lanes);
        at += sequence.literals;
        if (sequence.length == 0) continue;
        if (sequence.distance < 1 || sequence.distance > at || sequence.length > out.size - at) return -1;
        lanes.sync();
        copy_match(out, at, sequence.distance, sequence.length, lanes);
        at += sequence.length;
    }
    return cursor.fault ? -1 : at;
}

#endif
