// Blosc chunks: the numbers of the format, a chunk's header, and where its blocks and streams go in scratch.
//
// Source: c-blosc's README_CHUNK_FORMAT.rst, and what c-blosc 1.21 accepts. Integers in a chunk are little-endian.
//
// Decoded streams go to a scratch buffer first. In it each stream has a slot: its bytes, then a guard zone, then
// padding, so that the byte planes of a block start at multiples of 16.
#ifndef XGPUZARR_BLOSC_CUH
#define XGPUZARR_BLOSC_CUH

#include "common.cuh"

enum { HEADER_NBYTES = 16, GUARD_NBYTES = 32, MAX_SPLITS = 16, MIN_SPLIT_ELEMENTS = 128 };
enum Flag { FLAG_SHUFFLE = 1, FLAG_MEMCPYED = 2, FLAG_BITSHUFFLE = 4, FLAG_FUTURE = 8, FLAG_ONE_STREAM = 16 };
enum Codec { CODEC_BLOSCLZ, CODEC_LZ4, CODEC_SNAPPY, CODEC_ZLIB, CODEC_ZSTD, N_CODECS };

// What is wrong with a chunk; the same numbers as `xgpuzarr.plan.blosc_header.Problem`.
enum Problem {
    PROBLEM_NONE = 0,
    PROBLEM_SHORT = 1,
    PROBLEM_VERSION = 2,
    PROBLEM_SIZE = 3,
    PROBLEM_STORED_SIZE = 4,
    PROBLEM_FLAGS = 5,
    PROBLEM_TYPESIZE = 6,
    PROBLEM_BLOCKSIZE = 7,
    PROBLEM_TABLE = 8,
    PROBLEM_BLOCK_OFFSET = 9,
    PROBLEM_STREAM_SIZE = 10,
    PROBLEM_OVERLAP = 11,
    PROBLEM_STREAM = 12
};

// Rows of the header table, each `n_chunks` long. N_BLOCKS is 0 where a chunk holds no streams. FIRST_STREAM and SCRATCH
// say where its streams begin in the stream table and in scratch. SEAMS is 0 if the chunk's blocks fill it without gap
// or overlap (see `seam`).
enum HeaderRow {
    ROW_FLAGS,
    ROW_TYPESIZE,
    ROW_BLOCKSIZE,
    ROW_N_BLOCKS,
    ROW_FIRST_STREAM,
    ROW_SCRATCH,
    ROW_SEAMS,
    N_HEADER_ROWS
};

// Sums over all chunks: streams, bytes of scratch, the largest decoded size of a stream, and the streams of the chunks
// of each codec.
enum Total { TOTAL_STREAMS, TOTAL_SCRATCH, MAX_STREAM, FIRST_CODEC, N_TOTALS = FIRST_CODEC + N_CODECS };

struct Header {
    i64 decoded_nbytes, blocksize, encoded_nbytes;
    i32 version, codec_version, flags, typesize;

    XGZ_FN i32 codec() const { return flags >> 5; }
    XGZ_FN i64 n_blocks() const { return (decoded_nbytes + blocksize - 1) / blocksize; }
    XGZ_FN i64 block_nbytes(i64 block) const { return smaller(blocksize, decoded_nbytes - block * blocksize); }

    // Streams a block is split into: one a byte of the element, except in a shorter last block.
    XGZ_FN i32 n_splits(i64 block) const {
        const bool split = !(flags & FLAG_ONE_STREAM) && block_nbytes(block) == blocksize && typesize <= MAX_SPLITS &&
                           blocksize / typesize >= MIN_SPLIT_ELEMENTS;
        return split ? typesize : 1;
    }
    XGZ_FN i64 max_stream_nbytes() const {
        return larger(block_nbytes(0) / n_splits(0), block_nbytes(n_blocks() - 1) / n_splits(n_blocks() - 1));
    }
    XGZ_FN i64 n_streams() const { return (n_blocks() - 1) * n_splits(0) + n_splits(n_blocks() - 1); }

    XGZ_FN i64 slot_nbytes(i64 stream_nbytes) const { return round_up(stream_nbytes + GUARD_NBYTES, 16); }
    // Distance between the slots of a block's streams, and of its byte planes in scratch.
    XGZ_FN i64 block_slots_nbytes(i64 block) const {
        const i32 splits = n_splits(block);
        return splits * slot_nbytes(block_nbytes(block) / splits);
    }
    XGZ_FN i64 scratch_nbytes() const {
        return (n_blocks() - 1) * block_slots_nbytes(0) + block_slots_nbytes(n_blocks() - 1);
    }
};

XGZ_FN Header load_header(Bytes chunk) {
    return Header{load_u32(chunk, 4), load_u32(chunk, 8), load_u32(chunk, 12), chunk.load(0),
                  chunk.load(1),      chunk.load(2),      chunk.load(3)};
}

#endif
