// Decoders of the byte-oriented LZ formats: LZ4 blocks, Snappy and BloscLZ. One warp a stream, every byte bounds-checked.
//
// Sources: lz4's lz4_Block_format.md; snappy's format_description.txt; for BloscLZ, which has no written specification, the
// streams that c-blosc 1.21 writes (a FastLZ level 2 stream whose second literal of a run is not special).
//
// All lanes follow the same sequences and share out the bytes of each copy. On the host there is one lane, which does all.
#ifndef XGPUZARR_LZ_CUH
#define XGPUZARR_LZ_CUH

#include "common.cuh"

// Streams are shorter than 2^31 bytes, so positions in them take 32 bits: half the arithmetic of 64.
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

// Above this many bytes a copy is worth setting up for wide words.
enum { WIDE_COPY_NBYTES = 512 };

// Encoded bytes being read: a position that stops at the end, where it reads zeros.
struct Cursor {
    Stream in;
    i32 at;

    XGZ_FN bool at_end() const { return at >= in.size; }
    XGZ_FN u32 next() { return at_end() ? 0 : in.load(at++); }
    XGZ_FN bool has(i32 count) const { return in.holds(at, count); }
};

// Decoded bytes being written: everything before `at` is there. `fault` says that a copy did not fit.
struct Output {
    MutableStream out;
    Lanes lanes;
    i32 at;
    bool fault;

    XGZ_FN void copy(Stream from, i32 start, i32 to, i32 count) const {
        if (count >= WIDE_COPY_NBYTES) {
            copy_run(Bytes{from.data + start, count}, MutableBytes{out.data + to, count}, lanes.lane, lanes.count);
        } else {
            for (i32 i = lanes.lane; i < count; i += lanes.count) out.store(to + i, from.load(start + i));
        }
    }

    XGZ_FN void literals(Cursor* cursor, i64 count) {
        fault |= count > cursor->in.size - cursor->at || count > out.size - at;
        if (fault) return;
        copy(cursor->in, cursor->at, at, static_cast<i32>(count));
        cursor->at += static_cast<i32>(count);
        at += static_cast<i32>(count);
    }

    // The `count` bytes that start `distance` back. Where they overlap what is written, the first `distance` bytes repeat:
    // copies of all there is so far, twice as much each time.
    XGZ_FN void match(i64 distance, i64 count) {
        fault |= distance < 1 || distance > at || count > out.size - at;
        if (fault) return;
        const Stream written{out.data, out.size};
        const i32 from = at - static_cast<i32>(distance), end = at + static_cast<i32>(count);
        lanes.sync();
        if (count <= distance) {
            copy(written, from, at, static_cast<i32>(count));
            at = end;
            return;
        }
        if (distance < WIDE_COPY_NBYTES) {
            const i32 period = static_cast<i32>(distance);
            const i32 first = static_cast<i32>(smaller(count, WIDE_COPY_NBYTES / period * period));
            for (i32 i = lanes.lane; i < first; i += lanes.count) out.store(at + i, written.load(from + i % period));
            at += first;
        }
        while (at < end) {
            lanes.sync();
            const i32 available = (at - from) / static_cast<i32>(distance) * static_cast<i32>(distance);
            const i32 part = static_cast<i32>(smaller(end - at, available));
            copy(written, from, at, part);
            at += part;
        }
    }

    // Decoded bytes, or -1.
    XGZ_FN i32 result() const { return fault ? -1 : at; }
};

// A length that goes on: bytes are added until one is not 255. Bounded by the stream's length times 255.
XGZ_FN i64 extended_length(Cursor* cursor) {
    i64 length = 0;
    u32 byte = 255;
    while (byte == 255 && !cursor->at_end()) length += byte = cursor->next();
    return length;
}

// One LZ4 block. Ends after the literals of the last sequence.
XGZ_FN i32 decode_lz4(Stream in, MutableStream out, Lanes lanes) {
    Cursor cursor{in, 0};
    Output output{out, lanes, 0, in.size == 0};
    while (!output.fault) {
        const u32 token = cursor.next();
        i64 literals = token >> 4;
        if (literals == 15) literals += extended_length(&cursor);
        output.literals(&cursor, literals);
        if (output.fault || cursor.at_end()) break;
        output.fault = !cursor.has(2);
        const u32 distance = cursor.next() | cursor.next() << 8;
        i64 length = token & 15;
        if (length == 15) length += extended_length(&cursor);
        output.match(distance, length + 4);
        output.fault |= cursor.at_end();
    }
    return output.result();
}

// One Snappy stream without framing: the decoded size, then tagged literals and copies.
XGZ_FN i32 decode_snappy(Stream in, MutableStream out, Lanes lanes) {
    Cursor cursor{in, 0};
    u64 stated = 0;
    u32 byte = 0x80;
    for (i32 shift = 0; shift < 35 && (byte & 0x80); shift += 7) {
        byte = cursor.next();
        stated |= static_cast<u64>(byte & 0x7F) << shift;
    }
    Output output{out, lanes, 0, (byte & 0x80) || stated != static_cast<u64>(out.size)};
    while (!output.fault && !cursor.at_end()) {
        const u32 tag = cursor.next();
        const u32 extra_nbytes = tag & 3 ? (tag & 3) + (tag & 3) / 3 : (tag >> 2) < 60 ? 0 : (tag >> 2) - 59;
        if (!cursor.has(static_cast<i32>(extra_nbytes))) {
            output.fault = true;
            break;
        }
        u64 extra = 0;
        for (u32 i = 0; i < extra_nbytes; ++i) extra |= static_cast<u64>(cursor.next()) << (8 * i);
        if ((tag & 3) == 0) {
            output.literals(&cursor, static_cast<i64>(extra_nbytes ? extra : tag >> 2) + 1);
        } else if ((tag & 3) == 1) {
            output.match(static_cast<i64>((tag >> 5) << 8 | extra), ((tag >> 2) & 7) + 4);
        } else {
            output.match(static_cast<i64>(extra), (tag >> 2) + 1);
        }
    }
    return output.result();
}

// One BloscLZ stream. The first byte is always a literal run; its top three bits mean nothing.
XGZ_FN i32 decode_blosclz(Stream in, MutableStream out, Lanes lanes) {
    enum { FAR_DISTANCE = 8191 };  // distances up to this one take 13 bits
    Cursor cursor{in, 0};
    Output output{out, lanes, 0, in.size == 0};
    u32 control = cursor.next() & 31;
    while (!output.fault) {
        if (control < 32) {
            output.literals(&cursor, control + 1);
        } else {
            i64 length = (control >> 5) + 2;
            if (length == 9) length += extended_length(&cursor);
            const u32 high = (control & 31) << 8;
            output.fault = !cursor.has(1);
            const u32 low = cursor.next();
            u32 distance = high + low + 1;
            if (low == 255 && high == 31 << 8) {
                output.fault |= !cursor.has(2);
                distance = cursor.next() << 8;
                distance += cursor.next() + FAR_DISTANCE + 1;
            }
            output.match(distance, length);
        }
        if (cursor.at_end()) break;
        control = cursor.next();
    }
    return output.result();
}

#endif
