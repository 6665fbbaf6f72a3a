// Blosc chunks on the device: what a chunk's header says, which streams it holds, the streams of the LZ codecs, and the order
// of bytes and bits before the shuffle.
//
// Source: c-blosc's README_CHUNK_FORMAT.rst, and what c-blosc 1.21 accepts. Integers in a chunk are little-endian.
//
// Decoded streams go to a scratch buffer first. In it each stream has a slot: its bytes, then a guard zone, then padding, so
// that the byte planes of a block start at multiples of 16.
#include "lz.cuh"

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

// ---- headers --------------------------------------------------------------------------------------------------------

// Rows of the header table, each `n_chunks` long. N_BLOCKS, N_STREAMS and SCRATCH are 0 where a chunk holds a plain copy.
enum HeaderRow { ROW_FLAGS, ROW_TYPESIZE, ROW_BLOCKSIZE, ROW_N_BLOCKS, ROW_N_STREAMS, ROW_SCRATCH, N_HEADER_ROWS };

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
    return Header{load_u32(chunk, 4),
                  load_u32(chunk, 8),
                  load_u32(chunk, 12),
                  chunk.load(0),
                  chunk.load(1),
                  chunk.load(2),
                  chunk.load(3)};
}

XGZ_FN Problem check_header(const Header& header, Bytes chunk, i64 expected_nbytes) {
    if (chunk.size < HEADER_NBYTES) return PROBLEM_SHORT;
    if (header.version != 2) return PROBLEM_VERSION;
    if (header.decoded_nbytes != expected_nbytes) return PROBLEM_SIZE;
    if (header.encoded_nbytes != chunk.size) return PROBLEM_STORED_SIZE;
    if (header.flags & FLAG_FUTURE) return PROBLEM_FLAGS;
    if (header.typesize == 0) return PROBLEM_TYPESIZE;
    if (header.decoded_nbytes == 0) return PROBLEM_NONE;
    if (header.blocksize < 1 || header.blocksize > header.decoded_nbytes) return PROBLEM_BLOCKSIZE;
    if (header.flags & FLAG_MEMCPYED) {
        return chunk.size == header.decoded_nbytes + HEADER_NBYTES ? PROBLEM_NONE : PROBLEM_STORED_SIZE;
    }
    if (header.codec() >= N_CODECS) return PROBLEM_FLAGS;
    if (header.codec_version != 1) return PROBLEM_VERSION;
    if (header.blocksize % header.n_splits(0) != 0) return PROBLEM_BLOCKSIZE;
    // Each block has an offset, and each stream a size and at least one byte. This also bounds the tables made from here on.
    if (header.n_blocks() * 4 + header.n_streams() * 5 > chunk.size - HEADER_NBYTES) return PROBLEM_TABLE;
    return PROBLEM_NONE;
}

// Checks the header of each chunk: fills its column of `headers` (N_HEADER_ROWS x n_chunks) and its problem.
extern "C" __global__ void read_headers(const u8* encoded, i64 encoded_nbytes, const i64* offset, const i64* nbytes,
                                        i64 n_chunks, i64 expected_nbytes, i64* headers, i32* problem) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 c = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; c < n_chunks; c += stride) {
        const i64 chunk_nbytes = Column{nbytes, n_chunks}.load(c);
        const Bytes chunk = Bytes{encoded, encoded_nbytes}.part(Column{offset, n_chunks}.load(c), chunk_nbytes);
        const Header header = load_header(chunk);
        const Problem found = check_header(header, chunk, expected_nbytes);
        const bool streams = found == PROBLEM_NONE && header.decoded_nbytes > 0 && !(header.flags & FLAG_MEMCPYED);
        const Span<i64> rows{headers, N_HEADER_ROWS * n_chunks};
        rows.store(ROW_FLAGS * n_chunks + c, header.flags);
        rows.store(ROW_TYPESIZE * n_chunks + c, header.typesize);
        rows.store(ROW_BLOCKSIZE * n_chunks + c, header.blocksize);
        rows.store(ROW_N_BLOCKS * n_chunks + c, streams ? header.n_blocks() : 0);
        rows.store(ROW_N_STREAMS * n_chunks + c, streams ? header.n_streams() : 0);
        rows.store(ROW_SCRATCH * n_chunks + c, streams ? header.scratch_nbytes() : 0);
        Span<i32>{problem, n_chunks}.store(c, found);
    }
}

// ---- streams --------------------------------------------------------------------------------------------------------

// Rows of the stream table, each `n_streams` long. SOURCE counts from the start of the encoded buffer, DEST from the start of
// scratch; both in bytes, as are the sizes.
enum StreamRow { ROW_SOURCE, ROW_ENCODED, ROW_DEST, ROW_DECODED, ROW_CHUNK, ROW_KIND, N_STREAM_ROWS };

// What is done with a stream. The codecs keep their numbers.
enum Kind { KIND_RAW = N_CODECS, KIND_BAD };

// A zlib stream (RFC 1950) becomes the deflate stream inside it.
XGZ_FN bool strip_zlib(Bytes chunk, i64* at, i64* nbytes) {
    const u32 method = chunk.load(*at), flags = chunk.load(*at + 1);
    const bool good = *nbytes > 6 && (method & 15) == 8 && method >> 4 <= 7 && (method << 8 | flags) % 31 == 0 && !(flags & 32);
    *at += 2;
    *nbytes -= 6;
    return good;
}

// True if a stream is one Zstandard frame (RFC 8878, section 3.1.1) that states `decoded_nbytes` and whose blocks fill it to its
// last byte: what a decoder that trusts its input has to be told.
XGZ_FN bool check_zstd(Bytes frame, i64 decoded_nbytes) {
    const u32 descriptor = frame.load(4), size_code = descriptor >> 6, single = descriptor >> 5 & 1;
    const i64 window_nbytes = single ? 0 : 1;
    const i64 size_nbytes = size_code == 0 ? single : 1 << size_code;
    if (frame.size < 8 || load_u32(frame, 0) != 0xFD2FB528u || (descriptor & 11) || size_nbytes == 0) return false;
    i64 at = 5 + window_nbytes;
    const u64 stated = size_nbytes == 1   ? frame.load(at)
                       : size_nbytes == 2 ? load_u16(frame, at) + 256
                       : size_nbytes == 4 ? load_u32(frame, at)
                                          : load_u64(frame, at);
    if (stated != static_cast<u64>(decoded_nbytes)) return false;
    at += size_nbytes;
    const i64 end = frame.size - (descriptor & 4);
    i64 plain_nbytes = 0;
    for (bool last = false; !last;) {
        if (end - at < 3) return false;
        const u32 block = load_u16(frame, at) | frame.load(at + 2) << 16, type = block >> 1 & 3;
        const i64 block_nbytes = block >> 3;
        if (type == 3 || block_nbytes > 128 * 1024) return false;
        if (type < 2) plain_nbytes += block_nbytes;
        at += 3 + (type == 1 ? 1 : block_nbytes);
        last = block & 1;
    }
    return at == end && plain_nbytes <= decoded_nbytes;
}

struct StreamTable {
    Span<i64> rows;
    i64 n_streams;

    XGZ_FN void store(i64 stream, i64 source, i64 encoded_nbytes, i64 dest, i64 decoded_nbytes, i64 chunk,
                      i32 kind) const {
        rows.store(ROW_SOURCE * n_streams + stream, source);
        rows.store(ROW_ENCODED * n_streams + stream, encoded_nbytes);
        rows.store(ROW_DEST * n_streams + stream, dest);
        rows.store(ROW_DECODED * n_streams + stream, decoded_nbytes);
        rows.store(ROW_CHUNK * n_streams + stream, chunk);
        rows.store(ROW_KIND * n_streams + stream, kind);
    }
};

// The place of one block: in its chunk, in scratch, and in the stream table.
struct BlockPlace {
    i64 chunk, block, chunk_offset, scratch, first_stream;
};

// Finds the streams of one block and stores them; every stream gets a row, whatever is wrong. `end` is where the last one ends.
XGZ_FN Problem read_block(Bytes chunk, const Header& header, const BlockPlace& place, const StreamTable& table, i64* end) {
    const i32 n_splits = header.n_splits(place.block);
    const i64 decoded_nbytes = header.block_nbytes(place.block) / n_splits;
    const i64 table_end = HEADER_NBYTES + 4 * header.n_blocks();
    i64 at = load_u32(chunk, HEADER_NBYTES + 4 * place.block);
    Problem problem = at < table_end || at >= chunk.size ? PROBLEM_BLOCK_OFFSET : PROBLEM_NONE;
    for (i32 split = 0; split < n_splits; ++split) {
        i64 encoded_nbytes = load_u32(chunk, at);
        const i64 most = header.codec() == CODEC_SNAPPY ? chunk.size : decoded_nbytes;
        if (problem == PROBLEM_NONE &&
            (encoded_nbytes < 1 || encoded_nbytes > most || !chunk.holds(at, 4 + encoded_nbytes))) {
            problem = PROBLEM_STREAM_SIZE;
        }
        i64 source = at + 4;
        at = source + encoded_nbytes;
        i32 kind = encoded_nbytes == decoded_nbytes ? static_cast<i32>(KIND_RAW) : header.codec();
        if (problem == PROBLEM_NONE && kind == CODEC_ZLIB && !strip_zlib(chunk, &source, &encoded_nbytes)) {
            problem = PROBLEM_STREAM;
        }
        if (problem == PROBLEM_NONE && kind == CODEC_ZSTD && !check_zstd(chunk.part(source, encoded_nbytes), decoded_nbytes)) {
            problem = PROBLEM_STREAM;
        }
        if (problem != PROBLEM_NONE) kind = KIND_BAD;
        table.store(place.first_stream + split, place.chunk_offset + source, encoded_nbytes,
                    place.scratch + split * header.slot_nbytes(decoded_nbytes), decoded_nbytes, place.chunk, kind);
    }
    *end = at;
    return problem;
}

// Lists the streams of every chunk whose header is sound: one block of threads a chunk, one thread a block of the chunk.
//
// first_block, first_stream and scratch_offset are the running sums of the header table's rows. Also stores where each block
// starts and ends in its chunk, with the chunk's number in the upper 32 bits, so that overlaps can be found by sorting.
extern "C" __global__ void read_streams(const u8* encoded, i64 encoded_nbytes, const i64* offset, const i64* nbytes,
                                        i64 n_chunks, const i64* headers, const i64* first_block,
                                        const i64* first_stream, const i64* scratch_offset, i64* streams,
                                        i64 n_streams, i64* block_start, i64* block_end, i64 n_blocks, i32* problem) {
    for (i64 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const i64 chunk_nbytes = Column{nbytes, n_chunks}.load(c), chunk_offset = Column{offset, n_chunks}.load(c);
        const Bytes chunk = Bytes{encoded, encoded_nbytes}.part(chunk_offset, chunk_nbytes);
        const Header header = load_header(chunk);
        const i64 n_blocks_here = Column{headers, N_HEADER_ROWS * n_chunks}.load(ROW_N_BLOCKS * n_chunks + c);
        for (i64 block = threadIdx.x; block < n_blocks_here; block += blockDim.x) {
            const BlockPlace place{c, block, chunk_offset,
                                   Column{scratch_offset, n_chunks}.load(c) + block * header.block_slots_nbytes(0),
                                   Column{first_stream, n_chunks}.load(c) + block * header.n_splits(0)};
            i64 end;
            const Problem found = read_block(chunk, header, place, {{streams, N_STREAM_ROWS * n_streams}, n_streams}, &end);
            const i64 row = Column{first_block, n_chunks}.load(c) + block;
            const i64 start = load_u32(chunk, HEADER_NBYTES + 4 * block);
            Span<i64>{block_start, n_blocks}.store(row, c << 32 | start);
            Span<i64>{block_end, n_blocks}.store(row, c << 32 | smaller(end, 0xFFFFFFFFll));
            if (found != PROBLEM_NONE) Span<i32>{problem, n_chunks}.store(c, found);
        }
    }
}

// Decodes the LZ4, Snappy and BloscLZ streams of a table, one warp a stream; the others, and those of chunks with a problem,
// are left alone. A stream that does not decode to its size is a problem of its chunk.
extern "C" __global__ void decode_streams(const u8* encoded, i64 encoded_nbytes, u8* out, i64 out_nbytes,
                                          const i64* streams, i64 n_streams, i32* problem, i64 n_chunks) {
    const Lanes lanes = this_warp(threadIdx.x);
    if (lanes.lane >= lanes.count) return;
    const Column rows{streams, N_STREAM_ROWS * n_streams};
    const Span<i32> problems{problem, n_chunks};
    const i64 warps = blockDim.x / 32;
    for (i64 s = blockIdx.x * warps + threadIdx.x / 32; s < n_streams; s += gridDim.x * warps) {
        const i64 kind = rows.load(ROW_KIND * n_streams + s), chunk = rows.load(ROW_CHUNK * n_streams + s);
        const bool ours = kind == CODEC_BLOSCLZ || kind == CODEC_LZ4 || kind == CODEC_SNAPPY;
        if (!ours || problems.load(chunk) != PROBLEM_NONE) continue;
        const Bytes in =
            Bytes{encoded, encoded_nbytes}.part(rows.load(ROW_SOURCE * n_streams + s), rows.load(ROW_ENCODED * n_streams + s));
        const i64 decoded_nbytes = rows.load(ROW_DECODED * n_streams + s);
        const MutableBytes dest = MutableBytes{out, out_nbytes}.part(rows.load(ROW_DEST * n_streams + s), decoded_nbytes);
        i32 found = -1;
        if (in.size < 0x7FFFFFFF && dest.size < 0x7FFFFFFF && dest.size == decoded_nbytes) {
            const Stream from{in.data, static_cast<i32>(in.size)};
            const MutableStream to{dest.data, static_cast<i32>(dest.size)};
            found = kind == CODEC_LZ4      ? decode_lz4(from, to, lanes)
                    : kind == CODEC_SNAPPY ? decode_snappy(from, to, lanes)
                                           : decode_blosclz(from, to, lanes);
        }
        if (found != decoded_nbytes && lanes.lane == 0) {
            problems.store(chunk, PROBLEM_STREAM);
        }
    }
}

// ---- shuffle --------------------------------------------------------------------------------------------------------

// A decoded block before the shuffle is undone: `typesize` planes of `n_elements` bytes, then the bytes left over.
struct ShuffledBlock {
    Bytes bytes;
    i64 plane_stride, n_elements;
    i32 typesize;

    XGZ_FN u8 byte_at(i64 element, i32 plane) const { return bytes.load(plane * plane_stride + element); }
};

// `Word` holds neighbouring bytes of one plane, little-endian.
template <class Word>
XGZ_FN Word load_word(Bytes bytes, i64 at) {
    if ((address_of(bytes.data + at) & (sizeof(Word) - 1)) == 0) return load_unit<Word>(bytes, at);
    Word word = 0;
    for (u32 i = 0; i < sizeof(Word); ++i) word |= static_cast<Word>(static_cast<Word>(bytes.load(at + i)) << (8 * i));
    return word;
}

// 16 neighbouring bytes of the output, at any alignment.
XGZ_FN void store_16_bytes(MutableBytes out, i64 at, u128 value) {
    const u64 address = address_of(out.data + at);
    if ((address & 15) == 0) {
        store_unit<u128>(out, at, value);
    } else if ((address & 3) == 0) {
        store_unit<u32>(out, at, static_cast<u32>(value.low));
        store_unit<u32>(out, at + 4, static_cast<u32>(value.low >> 32));
        store_unit<u32>(out, at + 8, static_cast<u32>(value.high));
        store_unit<u32>(out, at + 12, static_cast<u32>(value.high >> 32));
    } else {
        for (i32 i = 0; i < 8; ++i) out.store(at + i, static_cast<u8>(value.low >> (8 * i)));
        for (i32 i = 0; i < 8; ++i) out.store(at + 8 + i, static_cast<u8>(value.high >> (8 * i)));
    }
}

XGZ_FN void put_byte(u128* value, i32 at, u64 byte) {
    if (at < 8) {
        value->low |= byte << (8 * at);
    } else {
        value->high |= byte << (8 * (at - 8));
    }
}

// Output bytes from `from` on, one by one: what the wide paths leave, and element sizes they do not know.
XGZ_FN void unshuffle_rest(const ShuffledBlock& block, MutableBytes out, i64 from, i64 first, i64 stride) {
    const i64 shuffled_nbytes = block.n_elements * block.typesize;
    for (i64 p = from + first; p < out.size; p += stride) {
        const u32 element = static_cast<u32>(p) / static_cast<u32>(block.typesize);
        const i32 plane = static_cast<i32>(static_cast<u32>(p) - element * static_cast<u32>(block.typesize));
        out.store(p, p < shuffled_nbytes ? block.byte_at(element, plane) : block.bytes.load(p));
    }
}

// Byte shuffle: 16 / typesize neighbouring bytes of every plane make 16 neighbouring bytes of the output.
template <i32 TYPESIZE, class Word>
XGZ_FN void unshuffle_bytes(const ShuffledBlock& block, MutableBytes out, i64 first, i64 stride) {
    const i32 elements = 16 / TYPESIZE;
    const i64 n_units = block.n_elements / elements;
    for (i64 unit = first; unit < n_units; unit += stride) {
        u128 value{0, 0};
#pragma unroll
        for (i32 plane = 0; plane < TYPESIZE; ++plane) {
            const Word word = load_word<Word>(block.bytes, plane * block.plane_stride + unit * elements);
#pragma unroll
            for (i32 e = 0; e < elements; ++e) {
                put_byte(&value, e * TYPESIZE + plane, static_cast<u64>(word >> (8 * e)) & 0xFF);
            }
        }
        store_16_bytes(out, 16 * unit, value);
    }
    unshuffle_rest(block, out, 16 * n_units, first, stride);
}

// Transposes an 8 x 8 matrix of bits, byte i its row i (Warren, Hacker's Delight, section 7-3).
XGZ_FN u64 transpose_bits(u64 x) {
    u64 t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull;
    return x ^ t ^ (t << 28);
}

// The bytes of eight neighbouring elements at byte `plane` of them. A plane of the bit shuffle is eight rows of bits, the lowest
// first; a byte of a row holds one bit of eight elements, the first lowest.
XGZ_FN u64 load_bits(const ShuffledBlock& block, i32 plane, i64 column) {
    const i64 row_nbytes = block.n_elements / 8;
    u64 rows = 0;
#pragma unroll
    for (i32 bit = 0; bit < 8; ++bit) {
        rows |= static_cast<u64>(block.byte_at(bit * row_nbytes + column, plane)) << (8 * bit);
    }
    return transpose_bits(rows);
}

// Bit shuffle of a fixed element size: a thread makes eight neighbouring elements, 16 bytes at a time.
template <i32 TYPESIZE>
XGZ_FN void unshuffle_bits(const ShuffledBlock& block, MutableBytes out, i64 first, i64 stride) {
    const i32 elements = 16 / TYPESIZE < 8 ? 16 / TYPESIZE : 8;  // that fill 16 bytes
    for (i64 column = first; column < block.n_elements / 8; column += stride) {
        u64 planes[TYPESIZE];
#pragma unroll
        for (i32 plane = 0; plane < TYPESIZE; ++plane) planes[plane] = load_bits(block, plane, column);
#pragma unroll
        for (i32 start = 0; start < 8; start += elements) {
            u128 value{0, 0};
#pragma unroll
            for (i32 e = 0; e < elements; ++e) {
#pragma unroll
                for (i32 plane = 0; plane < TYPESIZE; ++plane) {
                    put_byte(&value, e * TYPESIZE + plane, planes[plane] >> (8 * (start + e)) & 0xFF);
                }
            }
            store_16_bytes(out, (8 * column + start) * TYPESIZE, value);
        }
    }
}

// Bit shuffle of any element size: a thread makes one byte of eight neighbouring elements.
XGZ_FN void unshuffle_bits_of_any(const ShuffledBlock& block, MutableBytes out, i64 first, i64 stride) {
    const i64 n_columns = block.n_elements / 8;
    for (i64 i = first; i < n_columns * block.typesize; i += stride) {
        const i32 plane = static_cast<i32>(i / n_columns);
        const i64 column = i - plane * n_columns;
        const u64 bytes = load_bits(block, plane, column);
        for (i32 e = 0; e < 8; ++e) {
            out.store((8 * column + e) * block.typesize + plane, static_cast<u8>(bytes >> (8 * e)));
        }
    }
}

XGZ_FN void unshuffle_block(const ShuffledBlock& block, i64 flags, MutableBytes out, i64 first, i64 stride) {
    const bool by_bytes = (flags & FLAG_SHUFFLE) && block.typesize > 1;
    // c-blosc leaves a block as it is unless eight divides its elements.
    const bool by_bits = !by_bytes && (flags & FLAG_BITSHUFFLE) && block.n_elements > 0 && block.n_elements % 8 == 0;
    if (by_bytes) {
        switch (block.typesize) {
            case 2: return unshuffle_bytes<2, u64>(block, out, first, stride);
            case 4: return unshuffle_bytes<4, u32>(block, out, first, stride);
            case 8: return unshuffle_bytes<8, u16>(block, out, first, stride);
            case 16: return unshuffle_bytes<16, u8>(block, out, first, stride);
            default: return unshuffle_rest(block, out, 0, first, stride);
        }
    }
    if (!by_bits) {
        // Planes apart only where the block was split; they follow each other in the output.
        const i64 n_planes = block.plane_stride == block.n_elements ? 1 : block.typesize;
        const i64 plane_nbytes = out.size / n_planes;
        for (i64 plane = 0; plane < n_planes; ++plane) {
            copy_run(block.bytes.part(plane * block.plane_stride, plane_nbytes), out.part(plane * plane_nbytes, plane_nbytes),
                     first, stride);
        }
        return;
    }
    switch (block.typesize) {
        case 2: unshuffle_bits<2>(block, out, first, stride); break;
        case 4: unshuffle_bits<4>(block, out, first, stride); break;
        case 8: unshuffle_bits<8>(block, out, first, stride); break;
        default: unshuffle_bits_of_any(block, out, first, stride);
    }
    const i64 done = block.n_elements * block.typesize;
    for (i64 p = done + first; p < out.size; p += stride) out.store(p, block.bytes.load(p));
}

// Puts every chunk in its place: undoes the shuffle of its blocks, or copies what is not shuffled. `tiles` blocks of threads a
// chunk. Chunk c goes to out_offset[c], or to c * chunk_nbytes where that is null. Chunks with a problem are left out.
extern "C" __global__ void unshuffle_chunks(const u8* encoded, i64 encoded_nbytes, const i64* offset, const u8* scratch,
                                            i64 scratch_nbytes, const i64* scratch_offset, const i64* headers,
                                            i64 n_chunks, u8* out, i64 out_nbytes, const i64* out_offset,
                                            i64 chunk_nbytes, i64 tiles, const i32* problem, i32* status) {
    const Column rows{headers, N_HEADER_ROWS * n_chunks};
    const i64 tile_nbytes = 32 * 1024;
    for (i64 work = blockIdx.x; work < n_chunks * tiles; work += gridDim.x) {
        const i64 c = work / tiles, tile = work - c * tiles;
        if (Span<const i32>{problem, n_chunks}.load(c) != PROBLEM_NONE) continue;
        const i64 to = out_offset ? Column{out_offset, n_chunks}.load(c) : c * chunk_nbytes;
        const MutableBytes dest = MutableBytes{out, out_nbytes}.part(to, chunk_nbytes);
        if (dest.size != chunk_nbytes) {
            report({status, 1}, 1);
            continue;
        }
        const i64 flags = rows.load(ROW_FLAGS * n_chunks + c);
        if (flags & FLAG_MEMCPYED) {
            const Bytes plain =
                Bytes{encoded, encoded_nbytes}.part(Column{offset, n_chunks}.load(c) + HEADER_NBYTES, chunk_nbytes);
            copy_run(plain, plain.size == dest.size ? dest : dest.part(0, 0), tile * blockDim.x + threadIdx.x,
                     tiles * blockDim.x);
            continue;
        }
        const Header header{chunk_nbytes, rows.load(ROW_BLOCKSIZE * n_chunks + c), 0, 2, 1, static_cast<i32>(flags),
                            static_cast<i32>(rows.load(ROW_TYPESIZE * n_chunks + c))};
        const Bytes chunk_scratch =
            Bytes{scratch, scratch_nbytes}.part(Column{scratch_offset, n_chunks}.load(c), header.scratch_nbytes());
        // A block is shared by as many blocks of threads as it has tiles.
        const i64 parts = (header.blocksize + tile_nbytes - 1) / tile_nbytes;
        for (i64 item = tile; item < header.n_blocks() * parts; item += tiles) {
            const i64 block = item / parts, part = item - block * parts;
            const i64 block_nbytes = header.block_nbytes(block), n_elements = block_nbytes / header.typesize;
            const i32 n_splits = header.n_splits(block);
            const ShuffledBlock shuffled{
                chunk_scratch.part(block * header.block_slots_nbytes(0), header.block_slots_nbytes(block)),
                n_splits > 1 ? header.slot_nbytes(n_elements) : n_elements, n_elements, header.typesize};
            unshuffle_block(shuffled, flags, dest.part(block * header.blocksize, block_nbytes),
                            part * blockDim.x + threadIdx.x, parts * blockDim.x);
        }
    }
}
