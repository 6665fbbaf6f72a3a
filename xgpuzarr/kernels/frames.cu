// Frames for a decoder that trusts its input: checked before it, pointed at for it, and judged after it.
//
// Formats: RFC 8878 (Zstandard), RFC 1952 (gzip), RFC 1950 (zlib), RFC 1951 (deflate), lz4's lz4_Block_format.md behind
// the 4-byte size that numcodecs puts before it, and snappy's format_description.txt.
#include "frames.cuh"

// ---- before ---------------------------------------------------------------------------------------------------------

enum FrameCodec { FRAME_ZSTD, FRAME_LZ4, FRAME_GZIP, FRAME_ZLIB, FRAME_DEFLATE, FRAME_SNAPPY };

// What is wrong with a chunk; the same numbers as `xgpuzarr.plan.frames.Problem`.
enum FrameProblem {
    PROBLEM_NONE = 0,
    PROBLEM_TOO_SHORT = 1,
    PROBLEM_MAGIC = 2,
    PROBLEM_HEADER = 3,
    PROBLEM_SIZE = 4,
    PROBLEM_BLOCK = 5,
    PROBLEM_DICTIONARY = 64,  // nvCOMP 6.0.0 ends the CUDA context on a header that names one, even 0, which means none
    PROBLEM_SIZE_UNKNOWN = 65,
    PROBLEM_MORE_FRAMES = 66
};

// Most decoded bytes that one encoded byte can stand for.
enum { LZ4_MAX_RATIO = 255, DEFLATE_MAX_RATIO = 1032, SNAPPY_MAX_RATIO = 22 };

// What a chunk should decode to, and how much room its output has, in bytes.
struct Expected {
    i64 nbytes, room_nbytes;
};

// Where at most 8 skippable frames from `at` on end; `at` itself if there are none (RFC 8878, section 3.1.2).
XGZ_FN i64 skip_skippable(Bytes chunk, i64 at) {
    for (int n = 0; n < 8 && chunk.holds(at, 8) && (load_u32(chunk, at) & 0xFFFFFFF0u) == 0x184D2A50u; ++n) {
        at += 8 + static_cast<i64>(load_u32(chunk, at + 4));
    }
    return at;
}

// All blocks of the first frame are looked at. A frame that does not state its size is sound if they cannot decode to
// more than there is room for. A frame of very many small blocks is left to the host, so that the walk stays short.
XGZ_FN FrameProblem check_zstd(Bytes chunk, Expected expected) {
    const u32 magic = load_u32(chunk, 0);
    const ZstdHeader header = load_zstd_header(chunk);
    if (chunk.size < 8) return PROBLEM_TOO_SHORT;
    if ((magic & 0xFFFFFFF0u) == 0x184D2A50u) return PROBLEM_MORE_FRAMES;  // skippable
    if (magic != static_cast<u32>(ZSTD_MAGIC)) return PROBLEM_MAGIC;
    if (header.is_reserved) return PROBLEM_HEADER;
    const u64 expected_nbytes = static_cast<u64>(expected.nbytes);
    if (header.has_content_size && header.content_nbytes > expected_nbytes) return PROBLEM_SIZE;
    const i64 behind = header.has_checksum ? 4 : 0, max_blocks = 64 + expected.nbytes / 1024;
    if (chunk.size - header.nbytes - 3 < behind) return PROBLEM_TOO_SHORT;
    const ZstdBlocks blocks = walk_zstd_blocks(chunk, header, behind, max_blocks);
    if (blocks.is_wrong) return PROBLEM_BLOCK;
    if (header.has_dictionary_id) return PROBLEM_DICTIONARY;
    // bytes behind the frame may be another, which may be empty; the host tells
    if (!blocks.is_last || skip_skippable(chunk, blocks.end + behind) != chunk.size) return PROBLEM_MORE_FRAMES;
    if (!header.has_content_size) {
        return blocks.max_content_nbytes <= expected.room_nbytes ? PROBLEM_NONE : PROBLEM_SIZE_UNKNOWN;
    }
    const i64 content_nbytes = static_cast<i64>(header.content_nbytes);
    if (blocks.min_content_nbytes > content_nbytes || blocks.max_content_nbytes < content_nbytes) return PROBLEM_BLOCK;
    return header.content_nbytes < expected_nbytes ? PROBLEM_MORE_FRAMES : PROBLEM_NONE;
}

XGZ_FN FrameProblem check_lz4(Bytes chunk, Expected expected) {
    if (chunk.size < 5) return PROBLEM_TOO_SHORT;
    if (load_u32(chunk, 0) != expected.nbytes) return PROBLEM_SIZE;
    return (chunk.size - 4) * LZ4_MAX_RATIO < expected.nbytes ? PROBLEM_TOO_SHORT : PROBLEM_NONE;
}

// True unless a raw deflate stream starts with a block of a known type whose stored size, if any, fits (RFC 1951,
// section 3.2.3).
XGZ_FN bool deflate_is_wrong(Bytes chunk, i64 at, i64 nbytes) {
    const u32 type = chunk.load(at) >> 1 & 3, stored = load_u16(chunk, at + 1), complement = load_u16(chunk, at + 3);
    return type == 3 || (type == 0 && ((stored ^ complement) != 0xFFFF || stored + 5 > nbytes));
}

XGZ_FN FrameProblem check_gzip(Bytes chunk, Expected expected) {
    const u32 flags = chunk.load(3);
    if (chunk.size < 18) return PROBLEM_TOO_SHORT;
    if (load_u16(chunk, 0) != 0x8B1F) return PROBLEM_MAGIC;
    if (chunk.load(2) != 8 || (flags & 0xE0)) return PROBLEM_HEADER;
    if ((chunk.size - 18) * DEFLATE_MAX_RATIO < expected.nbytes) return PROBLEM_TOO_SHORT;
    const bool has_optional_fields = flags & 0x1E;
    if (!has_optional_fields && deflate_is_wrong(chunk, 10, chunk.size - 18)) return PROBLEM_BLOCK;
    return load_u32(chunk, chunk.size - 4) == static_cast<u32>(expected.nbytes) ? PROBLEM_NONE : PROBLEM_MORE_FRAMES;
}

XGZ_FN FrameProblem check_zlib(Bytes chunk, Expected expected) {
    const u32 method = chunk.load(0), flags = chunk.load(1);
    if (chunk.size < 8) return PROBLEM_TOO_SHORT;
    if ((method & 15) != 8 || method >> 4 > 7 || (method << 8 | flags) % 31 != 0) return PROBLEM_HEADER;
    if ((chunk.size - 6) * DEFLATE_MAX_RATIO < expected.nbytes) return PROBLEM_TOO_SHORT;
    if (flags & 0x20) return PROBLEM_DICTIONARY;
    return deflate_is_wrong(chunk, 2, chunk.size - 6) ? PROBLEM_BLOCK : PROBLEM_NONE;
}

XGZ_FN FrameProblem check_deflate(Bytes chunk, Expected expected) {
    if (chunk.size < 2 || chunk.size * DEFLATE_MAX_RATIO < expected.nbytes) return PROBLEM_TOO_SHORT;
    return deflate_is_wrong(chunk, 0, chunk.size) ? PROBLEM_BLOCK : PROBLEM_NONE;
}

XGZ_FN FrameProblem check_snappy(Bytes chunk, Expected expected) {
    if (chunk.size < 2) return PROBLEM_TOO_SHORT;
    const SnappySize stated = load_snappy_size(chunk);
    if (stated.nbytes == 0) return PROBLEM_HEADER;
    if (stated.content_nbytes != static_cast<u64>(expected.nbytes)) return PROBLEM_SIZE;
    return (chunk.size - stated.nbytes) * SNAPPY_MAX_RATIO < expected.nbytes ? PROBLEM_TOO_SHORT : PROBLEM_NONE;
}

XGZ_FN FrameProblem check_frame(i32 codec, Bytes chunk, Expected expected) {
    switch (codec) {
        case FRAME_ZSTD: return check_zstd(chunk, expected);
        case FRAME_LZ4: return check_lz4(chunk, expected);
        case FRAME_GZIP: return check_gzip(chunk, expected);
        case FRAME_ZLIB: return check_zlib(chunk, expected);
        case FRAME_DEFLATE: return check_deflate(chunk, expected);
        default: return check_snappy(chunk, expected);
    }
}

// Checks encoded chunks, one thread a chunk, and stores what is wrong with each. A chunk starts with its decoded size
// if `prefix_nbytes` is 4, and with its frame if that is 0. Where `skip` is not null, a number other than 0 in it is
// taken for the problem.
extern "C" __global__ void check_frames(const u8* encoded, i64 encoded_nbytes, const i64* offset, const i64* nbytes,
                                        const i32* skip, i64 n_chunks, i32 codec, i64 prefix_nbytes,
                                        i64 expected_nbytes, i64 room_nbytes, i32* problem) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 c = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; c < n_chunks; c += stride) {
        const Bytes chunk =
            Bytes{encoded, encoded_nbytes}.part(Column{offset, n_chunks}.load(c), Column{nbytes, n_chunks}.load(c));
        const i32 known = skip ? Span<const i32>{skip, n_chunks}.load(c) : 0;
        const bool is_size = prefix_nbytes == 0 || load_u32(chunk, 0) == expected_nbytes;
        const Bytes frame = chunk.part(prefix_nbytes, chunk.size - prefix_nbytes);
        const i32 found = is_size ? check_frame(codec, frame, {expected_nbytes, room_nbytes}) : PROBLEM_SIZE;
        Span<i32>{problem, n_chunks}.store(c, known != 0 ? known : found);
    }
}

// ---- at -------------------------------------------------------------------------------------------------------------

// Makes the four columns of addresses and sizes (source, its size, output, its room) that a decoder takes. A frame to
// leave out, or one outside the buffers, becomes the dummy frame: `dummy_nbytes` encoded bytes at `dummy`, decoding to
// `dummy_out_nbytes` bytes at `dummy_out`. Behind every other output a guard zone is written, of `guard_nbytes` bytes.
// `source` and `out_address` are addresses, to count from.
extern "C" __global__ void point_frames(u64 source, i64 source_nbytes, u64 out_address, u8* out, i64 out_nbytes,
                                        const i64* source_offset, const i64* frame_nbytes, const i64* out_offset,
                                        const i64* decoded_nbytes, const i32* skip, i64 n_frames, u64 dummy,
                                        i64 dummy_nbytes, u64 dummy_out, i64 dummy_out_nbytes, i64 guard_nbytes,
                                        u64* columns, i32* status) {
    const Span<u64> rows{columns, 4 * n_frames};
    const Bytes all_source{nullptr, source_nbytes};
    const MutableBytes all_out{out, out_nbytes};
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 f = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; f < n_frames; f += stride) {
        const i64 from = Column{source_offset, n_frames}.load(f), nbytes = Column{frame_nbytes, n_frames}.load(f);
        const i64 to = Column{out_offset, n_frames}.load(f), room = Column{decoded_nbytes, n_frames}.load(f);
        const bool is_left_out = Span<const i32>{skip, n_frames}.load(f) != 0;
        const bool is_inside = all_source.holds(from, nbytes) && all_out.holds(to, room) &&
                               all_out.holds(to + room, guard_nbytes);
        if (!is_left_out && !is_inside) report({status, 1}, 1);
        const bool is_real = !is_left_out && is_inside;
        rows.store(f, is_real ? source + static_cast<u64>(from) : dummy);
        rows.store(n_frames + f, static_cast<u64>(is_real ? nbytes : dummy_nbytes));
        rows.store(2 * n_frames + f, is_real ? out_address + static_cast<u64>(to) : dummy_out);
        rows.store(3 * n_frames + f, static_cast<u64>(is_real ? room : dummy_out_nbytes));
        if (is_real) {
            for (i64 i = 0; i < guard_nbytes; ++i) all_out.store(to + room + i, guard_byte(i));
        }
    }
}

// ---- after ----------------------------------------------------------------------------------------------------------

// Looks at what a decoder said of each frame, and at the guard zone behind its output. A frame that failed gives its
// chunk (chunk[f], or f where that is null) the problem `code`; a broken guard zone sets overrun[0] to it, since any
// neighbour may be overwritten. Guard zones lie behind the room that frames were given, which may be more than what
// they should decode to.
extern "C" __global__ void judge_frames(const u64* actual_nbytes, const i32* statuses, const u8* out, i64 out_nbytes,
                                        const i64* out_offset, const i64* decoded_nbytes, const i64* room_nbytes,
                                        const i32* skip, const i64* chunk, i64 n_frames, i64 guard_nbytes, i32 code,
                                        i32* problem, i64 n_chunks, i32* overrun) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 f = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; f < n_frames; f += stride) {
        if (Span<const i32>{skip, n_frames}.load(f) != 0) continue;
        const i64 decoded = Column{decoded_nbytes, n_frames}.load(f);
        const i64 room_end = Column{out_offset, n_frames}.load(f) + Column{room_nbytes, n_frames}.load(f);
        const Bytes guard = Bytes{out, out_nbytes}.part(room_end, guard_nbytes);
        bool is_whole = guard.size == guard_nbytes;
        for (i64 i = 0; i < guard.size; ++i) is_whole &= guard.load(i) == guard_byte(i);
        if (!is_whole) Span<i32>{overrun, 1}.store(0, code);
        if (!is_whole || Span<const i32>{statuses, n_frames}.load(f) != 0 ||
            Span<const u64>{actual_nbytes, n_frames}.load(f) != static_cast<u64>(decoded)) {
            Span<i32>{problem, n_chunks}.store(chunk ? Column{chunk, n_frames}.load(f) : f, code);
        }
    }
}
