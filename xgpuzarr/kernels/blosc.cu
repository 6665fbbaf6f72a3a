// Blosc chunks on the device: what each chunk's header says, which streams it holds, and the streams of the LZ codecs.
#include "blosc.cuh"
#include "frames.cuh"
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

// A number for a byte offset, such that sums of them tell sets of offsets apart (the finalizer of splitmix64: Steele,
// Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
//
// Blocks fill the bytes [a, b) without gap or overlap exactly if their starts and b are the same set as their ends and
// a. c-blosc writes such chunks, the blocks in any order. A sum needs no sorting.
XGZ_FN u64 seam(i64 offset) {
    u64 x = static_cast<u64>(offset) + 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Checks the header of each chunk: fills its column of `headers` (N_HEADER_ROWS x n_chunks) and its problem, and adds
// to `totals` (N_TOTALS, zero before). Chunks take their places in the stream table and in scratch as they come.
extern "C" __global__ void read_headers(const u8* encoded, i64 encoded_nbytes, const i64* offset, const i64* nbytes,
                                        i64 n_chunks, i64 expected_nbytes, i64* headers, u64* totals, i32* problem) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 c = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; c < n_chunks; c += stride) {
        const i64 chunk_nbytes = Column{nbytes, n_chunks}.load(c);
        const Bytes chunk = Bytes{encoded, encoded_nbytes}.part(Column{offset, n_chunks}.load(c), chunk_nbytes);
        const Header header = load_header(chunk);
        const Problem found = check_header(header, chunk, expected_nbytes);
        Span<i32>{problem, n_chunks}.store(c, found);
        const Span<i64> rows{headers, N_HEADER_ROWS * n_chunks};
        rows.store(ROW_FLAGS * n_chunks + c, header.flags);
        rows.store(ROW_TYPESIZE * n_chunks + c, header.typesize);
        rows.store(ROW_BLOCKSIZE * n_chunks + c, header.blocksize);
        if (found != PROBLEM_NONE || header.decoded_nbytes == 0 || (header.flags & FLAG_MEMCPYED)) {
            rows.store(ROW_N_BLOCKS * n_chunks + c, 0);
            continue;
        }
        const u64 n_streams = static_cast<u64>(header.n_streams());
        rows.store(ROW_N_BLOCKS * n_chunks + c, header.n_blocks());
        rows.store(ROW_FIRST_STREAM * n_chunks + c, static_cast<i64>(atomicAdd(totals + TOTAL_STREAMS, n_streams)));
        rows.store(ROW_SCRATCH * n_chunks + c, static_cast<i64>(atomicAdd(totals + TOTAL_SCRATCH,
                                                                          static_cast<u64>(header.scratch_nbytes()))));
        rows.store(ROW_SEAMS * n_chunks + c,
                   static_cast<i64>(seam(chunk_nbytes) - seam(HEADER_NBYTES + 4 * header.n_blocks())));
        atomicMax(totals + MAX_STREAM, static_cast<u64>(header.max_stream_nbytes()));
        atomicAdd(totals + FIRST_CODEC + header.codec(), n_streams);
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

// True if a stream is one Zstandard frame that states `decoded_nbytes` and whose blocks fill it to its last byte: what a
// decoder that trusts its input has to be told.
XGZ_FN bool check_zstd(Bytes frame, i64 decoded_nbytes) {
    const ZstdHeader header = load_zstd_header(frame);
    if (load_u32(frame, 0) != static_cast<u32>(ZSTD_MAGIC) || header.is_reserved || header.has_dictionary_id ||
        !header.has_content_size || header.content_nbytes != static_cast<u64>(decoded_nbytes)) {
        return false;
    }
    const i64 behind = header.has_checksum ? 4 : 0;
    const ZstdBlocks blocks = walk_zstd_blocks(frame, header, behind, frame.size);
    return blocks.is_last && blocks.end + behind == frame.size && blocks.min_content_nbytes <= decoded_nbytes &&
           blocks.max_content_nbytes >= decoded_nbytes;
}

// True if a stream holds what its codec's decoder may be given. A zlib stream becomes the deflate stream inside it.
XGZ_FN bool check_stream(i32 codec, Bytes chunk, i64* at, i64* nbytes, i64 decoded_nbytes) {
    if (codec == CODEC_ZLIB) return strip_zlib(chunk, at, nbytes);
    const Bytes stream = chunk.part(*at, *nbytes);
    if (codec == CODEC_ZSTD) return check_zstd(stream, decoded_nbytes);
    if (codec != CODEC_SNAPPY) return true;
    const SnappySize stated = load_snappy_size(stream);
    return stated.nbytes > 0 && stated.content_nbytes == static_cast<u64>(decoded_nbytes);
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
        if (problem == PROBLEM_NONE && kind != KIND_RAW &&
            !check_stream(kind, chunk, &source, &encoded_nbytes, decoded_nbytes)) {
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
extern "C" __global__ void read_streams(const u8* encoded, i64 encoded_nbytes, const i64* offset, const i64* nbytes,
                                        i64 n_chunks, i64* headers, i64* streams, i64 n_streams, i32* problem) {
    const Column rows{headers, N_HEADER_ROWS * n_chunks};
    for (i64 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const i64 chunk_nbytes = Column{nbytes, n_chunks}.load(c), chunk_offset = Column{offset, n_chunks}.load(c);
        const Bytes chunk = Bytes{encoded, encoded_nbytes}.part(chunk_offset, chunk_nbytes);
        const Header header = load_header(chunk);
        const i64 n_blocks = rows.load(ROW_N_BLOCKS * n_chunks + c);
        for (i64 block = threadIdx.x; block < n_blocks; block += blockDim.x) {
            const BlockPlace place{c, block, chunk_offset,
                                   rows.load(ROW_SCRATCH * n_chunks + c) + block * header.block_slots_nbytes(0),
                                   rows.load(ROW_FIRST_STREAM * n_chunks + c) + block * header.n_splits(0)};
            i64 end;
            const Problem found =
                read_block(chunk, header, place, {{streams, N_STREAM_ROWS * n_streams}, n_streams}, &end);
            if (found != PROBLEM_NONE) Span<i32>{problem, n_chunks}.store(c, found);
            const i64 start = load_u32(chunk, HEADER_NBYTES + 4 * block);
            atomicAdd(reinterpret_cast<u64*>(headers) + ROW_SEAMS * n_chunks + c, seam(start) - seam(end));
        }
    }
}

// Finds the chunks whose blocks overlap, or leave a gap: bytes that no decoder may take for a block.
extern "C" __global__ void check_seams(const i64* headers, i64 n_chunks, i32* problem) {
    const Column rows{headers, N_HEADER_ROWS * n_chunks};
    const Span<i32> problems{problem, n_chunks};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 c = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; c < n_chunks; c += stride) {
        const bool fits = rows.load(ROW_N_BLOCKS * n_chunks + c) == 0 || rows.load(ROW_SEAMS * n_chunks + c) == 0;
        if (!fits && problems.load(c) == PROBLEM_NONE) problems.store(c, PROBLEM_OVERLAP);
    }
}

// Marks the streams to leave out, with 1: those of another kind, and of chunks with a problem; 0 for the others.
extern "C" __global__ void select_streams(const i64* streams, i64 n_streams, i32 kind, const i32* problem, i64 n_chunks,
                                          i32* skip) {
    const Column rows{streams, N_STREAM_ROWS * n_streams};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 s = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; s < n_streams; s += stride) {
        const i64 chunk = rows.load(ROW_CHUNK * n_streams + s);
        const bool is_kind = rows.load(ROW_KIND * n_streams + s) == kind;
        const bool is_sound = Span<const i32>{problem, n_chunks}.load(chunk) == PROBLEM_NONE;
        Span<i32>{skip, n_streams}.store(s, is_kind && is_sound ? 0 : 1);
    }
}

// Copies the streams that were stored as they are: one block of threads a (stream, tile), `tiles` a stream.
extern "C" __global__ void copy_streams(const u8* encoded, i64 encoded_nbytes, u8* out, i64 out_nbytes,
                                        const i64* streams, i64 n_streams, i64 tiles) {
    const Column rows{streams, N_STREAM_ROWS * n_streams};
    for (i64 work = blockIdx.x; work < n_streams * tiles; work += gridDim.x) {
        const i64 s = work / tiles, tile = work - s * tiles;
        if (rows.load(ROW_KIND * n_streams + s) != KIND_RAW) continue;
        const i64 nbytes = rows.load(ROW_DECODED * n_streams + s);
        const Bytes from = Bytes{encoded, encoded_nbytes}.part(rows.load(ROW_SOURCE * n_streams + s), nbytes);
        const MutableBytes to = MutableBytes{out, out_nbytes}.part(rows.load(ROW_DEST * n_streams + s), from.size);
        copy_run(from, to, tile * blockDim.x + threadIdx.x, tiles * blockDim.x);
    }
}

// Decodes the streams of one kind, a warp a stream; others, and those of chunks with a problem, are left alone. A stream
// that does not decode to its size is a problem of its chunk.
template <LzFormat FORMAT>
XGZ_FN void decode_streams(i32 kind, Bytes encoded, MutableBytes out, Column streams, i64 n_streams,
                           Span<i32> problems) {
    const Lanes lanes = lanes_of(threadIdx.x);
    if (lanes.first >= lanes.end) return;
    const i64 warps = blockDim.x / N_LANES;
    for (i64 s = blockIdx.x * warps + threadIdx.x / N_LANES; s < n_streams; s += gridDim.x * warps) {
        const i64 chunk = streams.load(ROW_CHUNK * n_streams + s);
        if (streams.load(ROW_KIND * n_streams + s) != kind || problems.load(chunk) != PROBLEM_NONE) continue;
        const i64 decoded_nbytes = streams.load(ROW_DECODED * n_streams + s);
        const Bytes in =
            encoded.part(streams.load(ROW_SOURCE * n_streams + s), streams.load(ROW_ENCODED * n_streams + s));
        const MutableBytes dest = out.part(streams.load(ROW_DEST * n_streams + s), decoded_nbytes);
        i32 found = -1;
        if (in.size < MAX_STREAM_NBYTES && dest.size < MAX_STREAM_NBYTES && dest.size == decoded_nbytes) {
            found = decode_lz<FORMAT>({in.data, static_cast<i32>(in.size)}, {dest.data, static_cast<i32>(dest.size)},
                                      lanes);
        }
        if (found != decoded_nbytes && lanes.first == 0) problems.store(chunk, PROBLEM_STREAM);
    }
}

extern "C" __global__ void __launch_bounds__(64, 16)
    decode_blosclz(const u8* encoded, i64 encoded_nbytes, u8* out, i64 out_nbytes, const i64* streams, i64 n_streams,
                   i32* problem, i64 n_chunks) {
    decode_streams<LZ_BLOSCLZ>(CODEC_BLOSCLZ, {encoded, encoded_nbytes}, {out, out_nbytes},
                               {streams, N_STREAM_ROWS * n_streams}, n_streams, {problem, n_chunks});
}

extern "C" __global__ void __launch_bounds__(64, 16)
    decode_lz4(const u8* encoded, i64 encoded_nbytes, u8* out, i64 out_nbytes, const i64* streams, i64 n_streams,
               i32* problem, i64 n_chunks) {
    decode_streams<LZ_LZ4>(CODEC_LZ4, {encoded, encoded_nbytes}, {out, out_nbytes},
                           {streams, N_STREAM_ROWS * n_streams}, n_streams, {problem, n_chunks});
}

extern "C" __global__ void __launch_bounds__(64, 16)
    decode_snappy(const u8* encoded, i64 encoded_nbytes, u8* out, i64 out_nbytes, const i64* streams, i64 n_streams,
                  i32* problem, i64 n_chunks) {
    decode_streams<LZ_SNAPPY>(CODEC_SNAPPY, {encoded, encoded_nbytes}, {out, out_nbytes},
                              {streams, N_STREAM_ROWS * n_streams}, n_streams, {problem, n_chunks});
}
