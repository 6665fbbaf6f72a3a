// Frames without decoding them: what a Zstandard frame's header states and its block headers add up to, and the size
// that starts a Snappy stream.
//
// Sources: RFC 8878, section 3.1.1; snappy's format_description.txt.
#ifndef XGPUZARR_FRAMES_CUH
#define XGPUZARR_FRAMES_CUH

#include "common.cuh"

enum { ZSTD_MAGIC = 0xFD2FB528, ZSTD_MAX_BLOCK_NBYTES = 128 * 1024 };

struct ZstdHeader {
    i64 nbytes;  // of the header itself, the magic number included
    u64 content_nbytes, window_nbytes;
    bool has_content_size, has_dictionary_id, has_checksum, is_reserved;
};

XGZ_FN u64 load_number(Bytes bytes, i64 at, i64 nbytes) {
    if (nbytes == 8) return load_u64(bytes, at);
    return nbytes == 4 ? load_u32(bytes, at) : nbytes == 2 ? load_u16(bytes, at) : nbytes == 1 ? bytes.load(at) : 0;
}

// Whatever the bytes hold; zeros stand for those behind the end.
XGZ_FN ZstdHeader load_zstd_header(Bytes frame) {
    const u32 descriptor = frame.load(4), size_code = descriptor >> 6, dictionary_code = descriptor & 3;
    const i64 is_single = descriptor >> 5 & 1;
    const i64 dictionary_nbytes = dictionary_code == 3 ? 4 : dictionary_code;
    const i64 size_nbytes = size_code == 0 ? is_single : 1 << size_code;
    const i64 size_at = 6 - is_single + dictionary_nbytes;
    const u64 content_nbytes = load_number(frame, size_at, size_nbytes) + (size_nbytes == 2 ? 256 : 0);
    const u64 base = 1ull << ((frame.load(5) >> 3) + 10);
    return ZstdHeader{size_at + size_nbytes,
                      content_nbytes,
                      is_single ? content_nbytes : base + base / 8 * (frame.load(5) & 7),
                      size_nbytes > 0,
                      dictionary_nbytes > 0,
                      (descriptor & 4) != 0,
                      (descriptor & 8) != 0};
}

// The blocks of a frame. `end` is where they end; raw and repeated bytes are the least that they decode to.
struct ZstdBlocks {
    i64 count, end, min_content_nbytes, max_content_nbytes;
    bool is_wrong, is_last;
};

// Walks from block header to block header, at most `max_blocks` of them. Wrong are blocks of a reserved type or size,
// and those that leave less than `behind` bytes of the frame.
XGZ_FN ZstdBlocks walk_zstd_blocks(Bytes frame, const ZstdHeader& header, i64 behind, i64 max_blocks) {
    const u64 limit = ZSTD_MAX_BLOCK_NBYTES, most = header.window_nbytes < limit ? header.window_nbytes : limit;
    ZstdBlocks blocks{0, header.nbytes, 0, 0, false, false};
    while (!blocks.is_wrong && !blocks.is_last && blocks.count < max_blocks) {
        const u32 word = load_u16(frame, blocks.end) | frame.load(blocks.end + 2) << 16, type = word >> 1 & 3;
        const i64 nbytes = word >> 3, stored_nbytes = type == 1 ? 1 : nbytes;
        blocks.is_wrong = type == 3 || nbytes > ZSTD_MAX_BLOCK_NBYTES ||
                          !frame.holds(blocks.end, 3 + stored_nbytes + behind);
        if (blocks.is_wrong) break;
        blocks.is_last = word & 1;
        blocks.count += 1;
        blocks.end += 3 + stored_nbytes;
        if (type < 2) blocks.min_content_nbytes += nbytes;
        blocks.max_content_nbytes += type < 2 ? nbytes : static_cast<i64>(most);
    }
    return blocks;
}

// The decoded size that starts a Snappy stream, 7 bits a byte, and the bytes it takes: 0 for more than 5.
struct SnappySize {
    u64 content_nbytes;
    i64 nbytes;
};

XGZ_FN SnappySize load_snappy_size(Bytes stream) {
    u64 size = 0;
    for (i64 i = 0; i < 5; ++i) {
        const u64 byte = stream.load(i);
        size |= (byte & 0x7F) << (7 * i);
        if (byte < 0x80) return {size, i + 1};
    }
    return {size, 0};
}

#endif
