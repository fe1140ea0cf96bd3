// Copying and hashing in one pass, without Python's lock.
//
// The hash is that of the installed xxhash: its functions come in as pointers. What is read once
// from main memory is copied and, while still in the first level of cache, hashed. On x86 the copy
// is written past the cache, which saves reading the destination first and leaves the cache to the
// training thread.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Bytes copied before they are hashed; fits the first level of cache with room to spare.
constexpr size_t kPiece = 4 << 10;
// Shorter pieces are copied through the cache.
constexpr size_t kLeastPastCache = 1 << 10;
// How far ahead of the copy the source is asked for, and how much of the next piece before the hash,
// so that memory is not idle while it is computed.
constexpr size_t kAhead = 2 << 10;

struct Hash128 {
  uint64_t low, high;
};

struct Hasher {
  int (*reset)(void*);
  int (*update)(void*, const void*, size_t);
  Hash128 (*digest)(const void*);
  void* state;
};

void copy_piece(char* to, const char* from, size_t nbytes) {
#if defined(__x86_64__)
  if (nbytes >= kLeastPastCache && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    size_t whole = nbytes / 64 * 64;
    for (size_t at = 0; at < whole; at += 64) {
      _mm_prefetch(from + at + kAhead, _MM_HINT_T0);
      auto source = reinterpret_cast<const __m128i*>(from + at);
      auto target = reinterpret_cast<__m128i*>(to + at);
      __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    memcpy(to + whole, from + whole, nbytes - whole);
    return;
  }
#endif
  memcpy(to, from, nbytes);
}

// Copies and hashes; a source of null means that the bytes are in place and only to be hashed.
void pass(const Hasher& hasher, char* to, const char* from, size_t nbytes) {
  if (from == nullptr) {
    hasher.update(hasher.state, to, nbytes);
    return;
  }
  for (size_t at = 0; at < nbytes; at += kPiece) {
    size_t piece = nbytes - at < kPiece ? nbytes - at : kPiece;
    copy_piece(to + at, from + at, piece);
#if defined(__x86_64__)
    for (size_t next = 0; next < kAhead && piece == kPiece; next += 64) {
      _mm_prefetch(from + at + piece + next, _MM_HINT_T0);
    }
#endif
    hasher.update(hasher.state, from + at, piece);
  }
}

void write_big_endian(unsigned char* to, uint64_t value) {
  for (int i = 0; i < 8; i++) to[i] = static_cast<unsigned char>(value >> (56 - 8 * i));
}

}  // namespace

// Fills the chunks [first, last) of a segment of `nbytes` bytes that begins at `base`, and writes 16
// bytes of hash for each to `hashes`. Entry i has `sizes[i]` bytes at `offsets[i]`, which ascend, and
// they are copied from `sources[i]` (see `pass`). What lies between entries is set to zero. `entry`:
// the first entry that does not end before the first chunk.
extern "C" __attribute__((visibility("default"))) void deadpool_copy_chunks(
    const Hasher* hasher, char* base, uint64_t nbytes, uint64_t chunk_nbytes, uint64_t first,
    uint64_t last, const uint64_t* sources, const uint64_t* offsets, const uint64_t* sizes,
    uint64_t entries, uint64_t entry, unsigned char* hashes) {
  for (uint64_t chunk = first; chunk < last; chunk++) {
    hasher->reset(hasher->state);
    uint64_t at = chunk * chunk_nbytes;
    uint64_t end = at + chunk_nbytes < nbytes ? at + chunk_nbytes : nbytes;
    while (at < end) {
      while (entry < entries && offsets[entry] + sizes[entry] <= at) entry++;
      uint64_t begin = entry < entries && offsets[entry] < end ? offsets[entry] : end;
      if (at < begin) {
        memset(base + at, 0, begin - at);
        hasher->update(hasher->state, base + at, begin - at);
        at = begin;
        continue;
      }
      uint64_t inside = at - offsets[entry];
      uint64_t left = sizes[entry] - inside;
      uint64_t part = left < end - at ? left : end - at;
      auto source = reinterpret_cast<const char*>(sources[entry]);
      pass(*hasher, base + at, source == nullptr ? nullptr : source + inside, part);
      at += part;
    }
    Hash128 hash = hasher->digest(hasher->state);
    write_big_endian(hashes, hash.high);
    write_big_endian(hashes + 8, hash.low);
    hashes += 16;
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}
