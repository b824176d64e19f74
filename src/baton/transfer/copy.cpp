// Copies blocks of one KV cache into another: one pass over the bytes, without Python in between.
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

// Bytes copied between checks of `stop`.
constexpr int64_t kPieceBytes = 1 << 20;
// Copies from this size on bypass the CPU caches, which could not hold them: memory is then not read before it is
// written. memcpy does so itself for one long span, but not for many short ones.
constexpr int64_t kStreamBytes = 4 << 20;

void copy_piece(char* to, const char* from, int64_t bytes, bool stream) {
#ifdef __SSE2__
  if (stream && bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    auto* target = reinterpret_cast<__m128i*>(to);
    const auto* source = reinterpret_cast<const __m128i*>(from);
    for (int64_t left = bytes / 64; left > 0; --left, target += 4, source += 4) {
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Makes streamed stores visible to other threads before later stores.
void settle() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace

// Copies blocks `theirs[i]` of the memory at `from` into blocks `mine[i]` of the memory at `to`. A memory has `planes`
// planes, `*_plane_bytes` apart. Returns 1 if everything was copied, 0 if `stop` became nonzero before.
extern "C" __attribute__((visibility("default"))) int baton_copy_blocks(
    char* to, int64_t to_plane_bytes, const char* from, int64_t from_plane_bytes, int64_t planes, int64_t block_bytes,
    const int64_t* theirs, const int64_t* mine, int64_t count, const volatile int32_t* stop) {
  const bool stream = count * planes * block_bytes >= kStreamBytes;
  int is_whole = 1;
  for (int64_t first = 0, next; first < count && is_whole; first = next) {
    for (next = first + 1; next < count; ++next)
      if (theirs[next] != theirs[next - 1] + 1 || mine[next] != mine[next - 1] + 1) break;
    const int64_t run_bytes = (next - first) * block_bytes;
    for (int64_t plane = 0; plane < planes && is_whole; ++plane) {
      char* target = to + plane * to_plane_bytes + mine[first] * block_bytes;
      const char* source = from + plane * from_plane_bytes + theirs[first] * block_bytes;
      for (int64_t done = 0; done < run_bytes && is_whole; done += kPieceBytes) {
        if (*stop)
          is_whole = 0;
        else
          copy_piece(target + done, source + done, std::min(kPieceBytes, run_bytes - done), stream);
      }
    }
  }
  settle();
  return is_whole;
}
