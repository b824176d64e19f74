// The arithmetic of attention. Keys are taken in spans of kSpan positions from the first on. The order of all sums,
// within a span and from span to span, is fixed, so a query's result is the same, bit for bit, whichever others are
// computed with it: the zero that a query gives a key that comes after it leaves every sum as it was.
// Knows nothing of threads or caches.
#pragma once

#include <algorithm>

#include "kernels.hpp"

namespace baton {

constexpr int kSpan = 128;
// Queries computed together, for as many sums as the CPU has registers for.
#if defined(__AVX512F__)
constexpr int kQueries = 6;
#else
constexpr int kQueries = 2;
#endif

static inline int whole_lanes(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// A query's weighted sum of values over some spans, with weights relative to `largest`, and the sum of the weights.
struct Softmax {
    float largest, total;
};

// The keys and values of a span where they lie, for few queries. `keys` is filled up to whole fours with any key.
template <class W>
struct SpanRows {
    const W *const *keys, *const *values;
    int count;
};

// The same for many queries: values laid out by pack(), and keys by turn() where they can be. The sums are the same.
template <class W, class A>
struct PackedSpan {
    const W* const* keys;
    const A *turned, *values;
    int pitch;
};

// scores[q * kSpan + i] = queries[q] . keys[i].
template <int N, class W, class A>
static inline void score(const W* const* keys, int count, int width, const A* queries, float* scores) {
    const W* next = nullptr;
    for (int i = 0; i < count; i += 4) tile<N, 0>(keys + i, width, queries, width, scores + i, kSpan, next);
}
template <int N, class W, class A>
static inline void score(const SpanRows<W>& span, int count, int width, const A* queries, float* scores) {
    score<N>(span.keys, count, width, queries, scores);
}

// Keys are turned in groups of so many; the last group is filled up with any key.
constexpr int kTurned = 32;

// Lays keys out for many queries; returns whether that could be done, which takes bfloat16 and a width of whole lanes.
template <class W>
static inline bool turn(const W* const*, int, int, float*) {
    return false;
}

#if defined(__AVX512BF16__)
// Two by two, the numbers of 16 keys become columns: to[32 * i + 2 * k] is pair i of key k.
static inline void turn_block(const bf16* const keys[16], int offset, bf16* to) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(keys[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    auto pairs = [](__m512 a, __m512 b, bool high) {
        __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
    };
    for (int i = 0; i < 16; i += 4)
        for (int c = 0; c < 4; ++c) r[i + c] = pairs(t[i + c / 2], t[i + 2 + c / 2], c % 2);
    for (int c = 0; c < 4; ++c) {
        __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        __m512 e = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), f = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_ps(to + 32 * c, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + 32 * (4 + c), _mm512_shuffle_f32x4(e, f, 0x88));
        _mm512_storeu_ps(to + 32 * (8 + c), _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(to + 32 * (12 + c), _mm512_shuffle_f32x4(e, f, 0xdd));
    }
}

static inline bool turn(const bf16* const* keys, int count, int width, bf16* turned) {
    if (width % 32) return false;
    for (int i = 0; i < count; i += 16)
        for (int d = 0; d < width; d += 32, turned += 512) turn_block(keys + i, d, turned);
    return true;
}

// Sums over every 16th pair, which in tile() are the lanes of a vector, for N queries and two groups of keys. Joined in
// the order of sum4() they come to the same, but with a key for each lane nothing needs to be shuffled.
template <int N>
struct LaneSums {
    __m512 of[2][N];
    LaneSums operator+(const LaneSums& other) const {
        LaneSums both;
        for (int g = 0; g < 2; ++g)
            for (int n = 0; n < N; ++n) both.of[g][n] = _mm512_add_ps(of[g][n], other.of[g][n]);
        return both;
    }
};

template <int N>
static inline __attribute__((always_inline)) void score_turned(const bf16* turned, int width, const bf16* queries,
                                                               float* scores) {
    auto lane = [&](int l) __attribute__((always_inline)) {
        LaneSums<N> sums;
        for (int g = 0; g < 2; ++g)
            for (int n = 0; n < N; ++n) sums.of[g][n] = _mm512_setzero_ps();
        for (int d = 0; d < width; d += 32)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                int pair;
                memcpy(&pair, queries + n * width + d + 2 * l, sizeof pair);
                __m512bh query = (__m512bh)_mm512_set1_epi32(pair);
                for (int g = 0; g < 2; ++g) {
                    __m512bh keys = load_pairs(turned + 16 * (g * width + d + 2 * l));
                    sums.of[g][n] = _mm512_dpbf16_ps(sums.of[g][n], keys, query);
                }
            }
        return sums;
    };
    auto four = [&](int l) __attribute__((always_inline)) {
        return (lane(l) + lane(l + 2)) + (lane(l + 1) + lane(l + 3));
    };
    LaneSums<N> all = (four(0) + four(8)) + (four(4) + four(12));
    for (int g = 0; g < 2; ++g)
        for (int n = 0; n < N; ++n) _mm512_storeu_ps(scores + n * kSpan + 16 * g, all.of[g][n]);
}
#endif

template <int N, class W, class A>
static inline void score(const PackedSpan<W, A>& span, int count, int width, const A* queries, float* scores) {
    if (!span.turned) return score<N>(span.keys, count, width, queries, scores);
#if defined(__AVX512BF16__)
    if constexpr (sizeof(A) == 2) {
        for (int i = 0; i < count; i += kTurned) {
            const A* turned = span.turned + i * width;
            int n = 0;
            for (; n + 3 <= N; n += 3) score_turned<3>(turned, width, queries + n * width, scores + n * kSpan + i);
            if constexpr (N % 3) score_turned<N % 3>(turned, width, queries + n * width, scores + n * kSpan + i);
        }
    }
#endif
}
static inline float most_of(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float most = value[0];
    for (int i = 1; i < kLanes; ++i) most = value[i] > most ? value[i] : most;
    return most;
#endif
}

// Turns the first `count` of one query's scores into weights, and fills up to `until`, whole lanes, with zeros.
template <class A>
static inline Softmax soften(const float* scores, int count, int until, float scale, A* weights) {
    typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
    Integers lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    Floats most = splat(scores[0]), total = {};
    for (int i = 0; i < count; i += kLanes) {
        Floats next = load(scores + i);
        most = (lane < count - i) & (next > most) ? next : most;
    }
    float largest = most_of(most);
    for (int i = 0; i < until; i += kLanes) {
        Floats weight = exponential((load(scores + i) - largest) * scale);
        weight = lane < count - i ? weight : Floats{};
        total += weight;
        store(weights + i, weight);
    }
    return {largest * scale, sum(total)};
}

// A row for each position; for bfloat16 one for each two, their numbers in turn, which is how the CPU multiplies them.
// Rows are filled up to whole lanes with zeros, and the last pair too.
template <class W>
static inline void pack(const W* const* values, int count, int width, float* packed) {
    int pitch = whole_lanes(width);
    for (int p = 0; p < count; ++p, packed += pitch) {
        for (int d = 0; d < width; ++d) packed[d] = widen(values[p][d]);
        std::fill(packed + width, packed + pitch, 0.0f);
    }
}

template <class W>
static inline Floats values_at(const PackedSpan<W, float>& span, int p, int d) {
    return load(span.values + size_t(p) * span.pitch + d);
}
template <class W>
static inline Floats values_at(const SpanRows<W>& span, int p, int d) {
    return load(span.values[p] + d);
}

// out[q * pitch + d] = sum over p of weights[q * kSpan + p] * values[p][offset + d], for N queries and D vectors.
template <int N, int D, class Span>
static inline void mix_block(const Span& span, int offset, int count, const float* weights, float* out, int pitch) {
    Floats acc[N][D] = {};
    for (int p = 0; p < count; ++p) {  // The loops within are unrolled for the same reason as in tile().
        Floats value[D];
#pragma GCC unroll 8
        for (int d = 0; d < D; ++d) value[d] = values_at(span, p, offset + d * kLanes);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
            for (int d = 0; d < D; ++d)
                acc[n][d] = multiply_add(value[d], splat(weights[n * kSpan + p]), acc[n][d]);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
        for (int d = 0; d < D; ++d) store(out + n * pitch + offset + d * kLanes, acc[n][d]);
}

#if defined(__AVX512BF16__)
// Up to 16 numbers of each of two rows, in turn.
static inline __m512bh interleave(__m256i a, __m256i b) {
    __m512i low = _mm512_cvtepu16_epi32(a), high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
    return (__m512bh)_mm512_or_si512(low, high);
}

static inline void pack(const bf16* const* values, int count, int width, bf16* packed) {
    for (int p = 0; p < count; p += 2)
        for (int d = 0; d < width; d += 16, packed += 32) {
            __mmask16 mask = width - d < 16 ? (1u << (width - d)) - 1 : 0xffff;
            __m256i a = _mm256_maskz_loadu_epi16(mask, values[p] + d);
            __m256i b = p + 1 < count ? _mm256_maskz_loadu_epi16(mask, values[p + 1] + d) : _mm256_setzero_si256();
            _mm512_storeu_si512(packed, (__m512i)interleave(a, b));
        }
}

static inline __m512bh pairs_at(const PackedSpan<bf16, bf16>& span, int p, int d) {
    return load_pairs(span.values + size_t(p) * span.pitch + 2 * d);
}
static inline __m512bh pairs_at(const SpanRows<bf16>& span, int p, int d) {
    __m256i a = _mm256_loadu_si256((const __m256i*)(span.values[p] + d));
    if (p + 1 == span.count) return interleave(a, _mm256_setzero_si256());
    return interleave(a, _mm256_loadu_si256((const __m256i*)(span.values[p + 1] + d)));
}

template <int N, int D, class Span>
static inline void mix_block(const Span& span, int offset, int count, const bf16* weights, float* out, int pitch) {
    __m512 acc[N][D];
    for (int n = 0; n < N; ++n)
        for (int d = 0; d < D; ++d) acc[n][d] = _mm512_setzero_ps();
    for (int p = 0; p < count; p += 2) {
        __m512bh value[D];
        for (int d = 0; d < D; ++d) value[d] = pairs_at(span, p, offset + d * 16);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            int pair;
            memcpy(&pair, weights + n * kSpan + p, sizeof pair);
            __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
            for (int d = 0; d < D; ++d) acc[n][d] = _mm512_dpbf16_ps(acc[n][d], value[d], weight);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int d = 0; d < D; ++d) _mm512_storeu_ps(out + n * pitch + offset + d * 16, acc[n][d]);
}
#endif

template <int N, class A, class Span>
static inline void mix(const Span& span, int pitch, int count, const A* weights, float* out) {
    int d = 0;
    for (; d + 4 * kLanes <= pitch; d += 4 * kLanes) mix_block<N, 4>(span, d, count, weights, out, pitch);
    for (; d < pitch; d += kLanes) mix_block<N, 1>(span, d, count, weights, out, pitch);
}

// N queries, of which the n-th sees `seen(n)` keys of a span, never fewer than the one before it.
template <int N, class Span, class A, class Seen>
static void attend_to_span(const Span& span, int width, const A* queries, Seen seen, float* mixed, Softmax* sums) {
    alignas(64) float scores[N * kSpan];
    alignas(64) A weights[N * kSpan];
    int count = seen(N - 1), until = whole_lanes(count);
    score<N>(span, count, width, queries, scores);
    float scale = 1.0f / __builtin_sqrtf(width);
    for (int n = 0; n < N; ++n) sums[n] = soften(scores + n * kSpan, seen(n), until, scale, weights + n * kSpan);
    mix<N>(span, whole_lanes(width), count, weights, mixed);
}

// As above, for any number of queries up to kQueries.
template <class Span, class A, class Seen>
static void attend_to_span(int size, const Span& span, int width, const A* queries, Seen seen, float* mixed,
                           Softmax* sums) {
    switch (size) {
        case 1: return attend_to_span<1>(span, width, queries, seen, mixed, sums);
        case 2: return attend_to_span<2>(span, width, queries, seen, mixed, sums);
#if defined(__AVX512F__)
        case 3: return attend_to_span<3>(span, width, queries, seen, mixed, sums);
        case 4: return attend_to_span<4>(span, width, queries, seen, mixed, sums);
        case 5: return attend_to_span<5>(span, width, queries, seen, mixed, sums);
        case 6: return attend_to_span<6>(span, width, queries, seen, mixed, sums);
#endif
    }
}

// Adds one more span to the sum of those before it.
static inline void join(float* mixed, Softmax& sums, const float* more, const Softmax& added, int pitch) {
    float most = std::max(sums.largest, added.largest);
    float keep = exponential(sums.largest - most), scale = exponential(added.largest - most);
    sums = {most, multiply_add(sums.total, keep, added.total * scale)};
    for (int d = 0; d < pitch; d += kLanes)
        store(mixed + d, multiply_add(load(mixed + d), splat(keep), load(more + d) * scale));
}

}  // namespace baton
