// Blosc chunks on the device: what each chunk's header says, which streams it holds, and the streams of the LZ codecs.
#include "blosc.cuh"
#include "lz.cuh"

// ---- headers --------------------------------------------------------------------------------------------------------

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
    // Each block has an offset, and each stream a size and at least one byte. This also bounds the tables made from
    // here on.
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

// Rows of the stream table, each `n_streams` long. SOURCE counts from the start of the encoded buffer, DEST from the
// start of scratch; both in bytes, as are the sizes.
enum StreamRow { ROW_SOURCE, ROW_ENCODED, ROW_DEST, ROW_DECODED, ROW_CHUNK, ROW_KIND, N_STREAM_ROWS };

// What is done with a stream. The codecs keep their numbers.
enum Kind { KIND_RAW = N_CODECS, KIND_BAD };

// A zlib stream (RFC 1950) becomes the deflate stream inside it.
XGZ_FN bool strip_zlib(Bytes chunk, i64* at, i64* nbytes) {
    const u32 method = chunk.load(*at), flags = chunk.load(*at + 1);
    const bool good =
        *nbytes > 6 && (method & 15) == 8 && method >> 4 <= 7 && (method << 8 | flags) % 31 == 0 && !(flags & 32);
    *at += 2;
    *nbytes -= 6;
    return good;
}

// True if a stream is one Zstandard frame (RFC 8878, section 3.1.1) that states `decoded_nbytes` and whose blocks fill
// it to its last byte: what a decoder that trusts its input has to be told.
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

// Finds the streams of one block and stores them; every stream gets a row, whatever is wrong. `end` is where the last
// one ends.
XGZ_FN Problem read_block(Bytes chunk, const Header& header, const BlockPlace& place, const StreamTable& table,
                          i64* end) {
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
        if (problem == PROBLEM_NONE && kind == CODEC_ZSTD &&
            !check_zstd(chunk.part(source, encoded_nbytes), decoded_nbytes)) {
            problem = PROBLEM_STREAM;
        }
        if (problem != PROBLEM_NONE) kind = KIND_BAD;
        table.store(place.first_stream + split, place.chunk_offset + source, encoded_nbytes,
                    place.scratch + split * header.slot_nbytes(decoded_nbytes), decoded_nbytes, place.chunk, kind);
    }
    *end = at;
    return problem;
}

// Lists the streams of every chunk whose header is sound: one block of threads a chunk, one thread a block of the
// chunk.
//
// first_block, first_stream and scratch_offset are the running sums of the header table's rows. Also stores where each
// block starts and ends in its chunk, with the chunk's number in the upper 32 bits, so that overlaps can be found by
// sorting.
extern "C" __global__ void read_streams(const u8* encoded, i64 encoded_nbytes, const i64* offset, const i64* nbytes,
                                        i64 n_chunks, const i64* headers, const i64* first_block,
                                        const i64* first_stream, const i64* scratch_offset, i64* streams, i64 n_streams,
                                        i64* block_start, i64* block_end, i64 n_blocks, i32* problem) {
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
            const Problem found =
                read_block(chunk, header, place, {{streams, N_STREAM_ROWS * n_streams}, n_streams}, &end);
            const i64 row = Column{first_block, n_chunks}.load(c) + block;
            const i64 start = load_u32(chunk, HEADER_NBYTES + 4 * block);
            Span<i64>{block_start, n_blocks}.store(row, c << 32 | start);
            Span<i64>{block_end, n_blocks}.store(row, c << 32 | smaller(end, 0xFFFFFFFFll));
            if (found != PROBLEM_NONE) Span<i32>{problem, n_chunks}.store(c, found);
        }
    }
}

// Decodes the LZ4, Snappy and BloscLZ streams of a table whose kind is a bit of `kinds`, one warp a stream; the others,
// and those of chunks with a problem, are left alone. A stream that does not decode to its size is a problem of its
// chunk.
extern "C" __global__ void __launch_bounds__(64, 16)
    decode_streams(const u8* encoded, i64 encoded_nbytes, u8* out, i64 out_nbytes, const i64* streams, i64 n_streams,
                   i32 kinds, i32* problem, i64 n_chunks) {
    const Lanes lanes = this_warp(threadIdx.x);
    if (lanes.lane >= lanes.count) return;
    const Column rows{streams, N_STREAM_ROWS * n_streams};
    const Span<i32> problems{problem, n_chunks};
    const i64 warps = blockDim.x / 32;
    for (i64 s = blockIdx.x * warps + threadIdx.x / 32; s < n_streams; s += gridDim.x * warps) {
        const i64 kind = rows.load(ROW_KIND * n_streams + s), chunk = rows.load(ROW_CHUNK * n_streams + s);
        const bool ours = kind == CODEC_BLOSCLZ || kind == CODEC_LZ4 || kind == CODEC_SNAPPY;
        if (!ours || !(kinds >> kind & 1) || problems.load(chunk) != PROBLEM_NONE) continue;
        const Bytes in = Bytes{encoded, encoded_nbytes}.part(rows.load(ROW_SOURCE * n_streams + s),
                                                             rows.load(ROW_ENCODED * n_streams + s));
        const i64 decoded_nbytes = rows.load(ROW_DECODED * n_streams + s);
        const MutableBytes dest =
            MutableBytes{out, out_nbytes}.part(rows.load(ROW_DEST * n_streams + s), decoded_nbytes);
        i32 found = -1;
        if (in.size < MAX_STREAM_NBYTES && dest.size < MAX_STREAM_NBYTES && dest.size == decoded_nbytes) {
            const LzFormat format = kind == CODEC_LZ4 ? LZ_LZ4 : kind == CODEC_SNAPPY ? LZ_SNAPPY : LZ_BLOSCLZ;
            found = decode_lz(format, {in.data, static_cast<i32>(in.size)}, {dest.data, static_cast<i32>(dest.size)},
                              lanes);
        }
        if (found != decoded_nbytes && lanes.lane == 0) {
            problems.store(chunk, PROBLEM_STREAM);
        }
    }
}
