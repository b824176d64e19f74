// The arithmetic of a step, but for attention. Each result is summed in an order that depends on the width alone, so a
// row's result is the same, bit for bit, alone and in any batch. Knows nothing of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace baton {

// Weights are asked for from memory at least this far ahead of their use.
constexpr size_t kAheadBytes = 4096;
// Rows of inputs from which on weights are widened once for all of them, and not again in each tile.
constexpr int kWidenRows = 8;
// What can be in use together without pushing weights that were fetched early out of the first cache again.
constexpr size_t kNearBytes = 24 << 10;

struct bf16 {
    uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTile = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTile = 3;
#else
constexpr int kLanes = 4, kTile = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// What the inputs of a product with weights of type W are kept as.
template <class W>
struct Input {
    using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Input<bf16> {
    using type = bf16;
};
#endif

static inline float widen(float value) { return value; }
static inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return {uint16_t(nan ? (bits >> 16 | 0x40) : rounded)};
}

static inline Floats load(const float* from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}
static inline Floats load(const bf16* from) {
    Halves half;
    memcpy(&half, from, sizeof half);
    Words wide = __builtin_convertvector(half, Words) << 16;
    Floats value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }
static inline void store(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#else
    Words bits = (Words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    Halves half = __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded, Halves);
#endif
    memcpy(to, &half, sizeof half);
}

// Minus zero, not plus zero: x - 0 is x for every x, so no instruction is needed, but -0 + 0 is 0.
static inline Floats splat(float value) { return value - Floats{}; }

// a * b + c, rounded once where the CPU has an instruction for that, else twice. The library is compiled with
// -ffp-contract=off, so this is the only place that fuses: a compiler that is free to do so decides for each loop and
// each CPU, and the same sum would be rounded differently in the code for one row and in the code for two.
static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Keeps a value in a register; else the compiler loads it again for each of its uses.
static inline void keep(Floats& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__AVX__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
}

template <class V, class T>
static inline V load_as(const T* from) {
    if constexpr (sizeof(V) == sizeof(float)) return widen(*from);
    else return load(from);
}

// out[i] = make(i), with the precision of W, in the form that products with W take. `make` is asked for a vector of
// results as far as there are whole ones, then for one at a time.
template <class W, class A, class Make>
static inline void put_all(A* out, int count, Make make) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        W rounded[kLanes];
        store(rounded, make(i, Floats{}));
        if constexpr (sizeof(A) == sizeof(W)) memcpy(out + i, rounded, sizeof rounded);
        else store(out + i, load(rounded));
    }
    for (; i < count; ++i) {
        W rounded;
        if constexpr (sizeof(W) == sizeof(float)) rounded = make(i, 0.0f);
        else rounded = narrow(make(i, 0.0f));
        if constexpr (sizeof(A) == sizeof(W)) out[i] = rounded;
        else out[i] = widen(rounded);
    }
}

static inline float sum(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float lanes[kLanes];
    memcpy(lanes, &value, sizeof lanes);
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

// The sums of four vectors, each in the order of sum().
static inline void sum_four(const Floats values[4], float* sums) {
#if defined(__AVX__)
    __m128 r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
        __m512 whole = (__m512)values[i], upper = _mm512_shuffle_f32x4(whole, whole, 0xee);
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_castps512_ps256(upper));
#else
        __m256 half = (__m256)values[i];
#endif
        r[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
    _mm_storeu_ps(sums, _mm_add_ps(_mm_add_ps(r[0], r[2]), _mm_add_ps(r[1], r[3])));
#else
    for (int i = 0; i < 4; ++i) sums[i] = sum(values[i]);
#endif
}

template <int P>
static inline void fetch(const void* line) {
    if (P > 0) __builtin_prefetch(line, 0, 3);
    if (P < 0) __builtin_prefetch(line, 0, 2);
}

// out[n * stride + m] = weights[m] . inputs[n] for four rows of weights and N of inputs. Meanwhile P times as many lines
// of memory as one row has are fetched from `next` on: in the order they lie, which is what lets the CPU run ahead.
// They come into the first cache, or with a negative P into the second.
template <int N, int P, class W, class A>
static inline void tile(const W* const weights[4], int width, const A* inputs, size_t pitch, float* out, size_t stride,
                        const W* next) {
    Floats acc[4][N] = {};
    int k = 0;
    // Unrolled before all else, so that the sums stay in registers: GCC stores them in each turn otherwise.
    for (; k + kLanes <= width; k += kLanes) {
        Floats in[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            in[n] = load(inputs + n * pitch + k);
            if constexpr (sizeof(W) == sizeof(float)) keep(in[n]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < 4; ++m) {
            if (m < std::abs(P)) fetch<P>(next + std::abs(P) * k + m * kLanes);
            Floats w = load(weights[m] + k);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) acc[m][n] = multiply_add(w, in[n], acc[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
        const Floats four[4] = {acc[0][n], acc[1][n], acc[2][n], acc[3][n]};
        float* to = out + n * stride;
        sum_four(four, to);
        for (int m = 0; m < 4 && k < width; ++m)
            for (int i = k; i < width; ++i)
                to[m] = multiply_add(widen(weights[m][i]), widen(inputs[n * pitch + i]), to[m]);
    }
}

#if defined(__AVX512BF16__)
static inline __m512bh load_pairs(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
static inline __m512bh load_pairs(const bf16* from, __mmask32 mask) {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}

// Lane i is the sum of all lanes of the i-th vector.
static inline __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <int N, int P>
static inline void tile(const bf16* const weights[4], int width, const bf16* inputs, size_t pitch, float* out,
                        size_t stride, const bf16* next) {
    const bf16 *w0 = weights[0], *w1 = weights[1], *w2 = weights[2], *w3 = weights[3];
    __m512 acc[4][N];
    for (int m = 0; m < 4; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = _mm512_setzero_ps();
    auto multiply = [&](__m512bh a, __m512bh b, __m512bh c, __m512bh d, int n, __m512bh in) {
        acc[0][n] = _mm512_dpbf16_ps(acc[0][n], a, in);
        acc[1][n] = _mm512_dpbf16_ps(acc[1][n], b, in);
        acc[2][n] = _mm512_dpbf16_ps(acc[2][n], c, in);
        acc[3][n] = _mm512_dpbf16_ps(acc[3][n], d, in);
    };
    int k = 0;
    for (; k + 32 <= width; k += 32) {
        for (int line = 0; line < std::abs(P); ++line) fetch<P>(next + std::abs(P) * k + line * 32);
        __m512bh a = load_pairs(w0 + k), b = load_pairs(w1 + k), c = load_pairs(w2 + k), d = load_pairs(w3 + k);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) multiply(a, b, c, d, n, load_pairs(inputs + n * pitch + k));
    }
    if (k < width) {
        __mmask32 mask = (1u << (width - k)) - 1;
        __m512bh a = load_pairs(w0 + k, mask), b = load_pairs(w1 + k, mask);
        __m512bh c = load_pairs(w2 + k, mask), d = load_pairs(w3 + k, mask);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) multiply(a, b, c, d, n, load_pairs(inputs + n * pitch + k, mask));
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) _mm_storeu_ps(out + n * stride, sum4(acc[0][n], acc[1][n], acc[2][n], acc[3][n]));
}
#endif

template <int P, class W, class A>
static inline void tile_of(int size, const W* const weights[4], int width, const A* inputs, size_t pitch, float* out,
                           size_t stride, const W* next) {
    switch (size) {
        case 1: return tile<1, P>(weights, width, inputs, pitch, out, stride, next);
        case 2: return tile<2, P>(weights, width, inputs, pitch, out, stride, next);
        case 3: return tile<3, P>(weights, width, inputs, pitch, out, stride, next);
        case 4: return tile<4, P>(weights, width, inputs, pitch, out, stride, next);
        case 5: return tile<5, P>(weights, width, inputs, pitch, out, stride, next);
        case 6: return tile<6, P>(weights, width, inputs, pitch, out, stride, next);
    }
}

// As tile(), for any number of input rows. The weights come from memory once; later tiles find them in the cache. The
// four rows that will be wanted soon, at `next`, are fetched evenly over the tiles, so that memory and sums overlap.
template <class W, class A>
static inline void tiles(const W* const weights[4], int width, const A* inputs, size_t pitch, int rows, float* out,
                         size_t stride, const W* next) {
    int count = (rows + kTile - 1) / kTile, share = count == 1 ? 4 : count < 4 ? 2 : 1, left = next ? 4 : 0;
    bool near = rows == 1 || (8 * sizeof(W) + rows * sizeof(A)) * width <= kNearBytes;
    for (int i = 0, row = 0, size; i < count; ++i, row += size) {
        size = (rows - row + count - i - 1) / (count - i);
        const A* in = inputs + row * pitch;
        float* to = out + row * stride;
        switch (left == 0 ? 0 : near ? share : -share) {
            case 4: tile_of<4>(size, weights, width, in, pitch, to, stride, next); break;
            case 2: tile_of<2>(size, weights, width, in, pitch, to, stride, next); break;
            case 1: tile_of<1>(size, weights, width, in, pitch, to, stride, next); break;
            case -4: tile_of<-4>(size, weights, width, in, pitch, to, stride, next); break;
            case -2: tile_of<-2>(size, weights, width, in, pitch, to, stride, next); break;
            case -1: tile_of<-1>(size, weights, width, in, pitch, to, stride, next); break;
            default: tile_of<0>(size, weights, width, in, pitch, to, stride, next); break;
        }
        if (left == 0) continue;
        next += size_t(share) * width;
        left -= share;
    }
}

// Rows of widened weights begin at lines of the cache.
static inline size_t wide_pitch(int width) { return (size_t(width) + 15) / 16 * 16 + 16; }

// As many rows of weights as are a multiple of four, each four of them widened before they are used. The sums are those
// of tiles(): widening is exact.
template <class W>
static inline void multiply_widened(const W* weights, int count, int width, const float* inputs, size_t pitch, int rows,
                                    float* out, size_t stride, float* wide) {
    const size_t step = wide_pitch(width);
    const float* const four[4] = {wide, wide + step, wide + 2 * step, wide + 3 * step};
    for (int m = 0; m + 4 <= count; m += 4) {
        for (int i = 0; i < 4; ++i) {
            const W* from = weights + size_t(m + i) * width;
            put_all<float>(wide + i * step, width, [&](int k, auto kind) { return load_as<decltype(kind)>(from + k); });
        }
        tiles<float>(four, width, inputs, pitch, rows, out + m, stride, nullptr);
    }
}

// out[r * stride + m] = weights[m] . inputs[r] for `count` contiguous rows of weights. `wide` has room for four rows of
// wide_pitch(width).
template <class W, class A>
static inline void multiply(const W* weights, int count, int width, const A* inputs, size_t pitch, int rows, float* out,
                            size_t stride, float* wide) {
    if constexpr (sizeof(A) > sizeof(W))
        if (rows >= kWidenRows && count >= 4) {
            int whole = count / 4 * 4;
            multiply_widened(weights, whole, width, inputs, pitch, rows, out, stride, wide);
            if (whole == count) return;
            weights += size_t(whole) * width;
            count -= whole;
            out += whole;
        }
    // Measured with AVX2: so many rows at once that they stay in the first cache beside four rows of weights, which then
    // come from the second.
    int fitting = (int(kNearBytes / width) - 4 * int(sizeof(W))) / int(sizeof(A)) / kTile * kTile;
    if (kLanes == 8 && fitting >= 2 * kTile && rows > fitting) {
        for (int row = 0; row < rows; row += fitting)
            multiply(weights, count, width, inputs + row * pitch, pitch, rows - row < fitting ? rows - row : fitting,
                     out + row * stride, stride, wide);
        return;
    }
    ptrdiff_t ahead = ptrdiff_t(width) * 4 * ((kAheadBytes + 4 * width * sizeof(W) - 1) / (4 * width * sizeof(W)));
    int m = 0;
    for (; m + 4 <= count; m += 4) {
        const W* from = weights + size_t(m) * width;
        const W* const four[4] = {from, from + width, from + 2 * size_t(width), from + 3 * size_t(width)};
        tiles(four, width, inputs, pitch, rows, out + m, stride, from + ahead);
    }
    if (m == count) return;
    // A last group of fewer than four repeats its last row; the repeats are not kept.
    const W* four[4];
    for (int i = 0; i < 4; ++i) four[i] = weights + size_t(m + i < count ? m + i : count - 1) * width;
    for (int row = 0; row < rows; ++row) {
        float kept[4];
        tiles<W>(four, width, inputs + row * pitch, pitch, 1, kept, 4, nullptr);
        for (int i = 0; m + i < count; ++i) out[row * stride + m + i] = kept[i];
    }
}

// Within 2 ulp for ordinary values; never 0 or infinite, and NaN for NaN.
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = multiply_add(x, 1.44269504f, 12582912.0f);  // The low bits of 1.5 * 2^23 + n are n.
    float n = shifted - 12582912.0f;
    float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
    float p = multiply_add(r, 0.00139819994f, 0.00833345205f);
    p = multiply_add(r, p, 0.0416664556f);
    p = multiply_add(r, p, 0.166666655f);
    p = multiply_add(r, p, 0.5f);
    p = multiply_add(r, p, 1.0f);
    p = multiply_add(r, p, 1.0f);
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

// exponential() for a vector.
static inline Floats exponential(Floats x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    x = x > splat(88.0f) ? splat(88.0f) : x;
    Floats shifted = multiply_add(x, splat(1.44269504f), splat(12582912.0f));
    Floats n = shifted - 12582912.0f;
    Floats r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
    Floats p = multiply_add(r, splat(0.00139819994f), splat(0.00833345205f));
    p = multiply_add(r, p, splat(0.0416664556f));
    p = multiply_add(r, p, splat(0.166666655f));
    p = multiply_add(r, p, splat(0.5f));
    p = multiply_add(r, p, splat(1.0f));
    p = multiply_add(r, p, splat(1.0f));
    Words bits = ((Words)shifted + 127) << 23;
    return p * (Floats)bits;
}

template <class W, class A>
static inline void normalise(const float* x, const W* weight, int width, float eps, A* out) {
    // Not an OpenMP reduction: the compiler chooses its order, and may let it depend on the alignment of a row.
    Floats lanes = {};
    int k = 0;
    for (; k + kLanes <= width; k += kLanes) lanes = multiply_add(load(x + k), load(x + k), lanes);
    float squares = sum(lanes);
    for (; k < width; ++k) squares = multiply_add(x[k], x[k], squares);
    float scale = 1.0f / __builtin_sqrtf(squares / width + eps);
    put_all<W>(out, width, [&](int i, auto kind) {
        using V = decltype(kind);
        return load_as<V>(x + i) * scale * load_as<V>(weight + i);
    });
}

// Turns each pair (i, i + half) of one head by its angle.
static inline void rotate(float* head, const float* cos, const float* sin, int half) {
#pragma omp simd
    for (int i = 0; i < half; ++i) {
        float a = head[i], b = head[i + half];
        head[i] = multiply_add(a, cos[i], -(b * sin[i]));
        head[i + half] = multiply_add(b, cos[i], a * sin[i]);
    }
}

template <class W, class A>
static inline void gate(const float* gates, const float* ups, int count, A* out) {
    put_all<W>(out, count, [&](int i, auto kind) {
        auto gate = load_as<decltype(kind)>(gates + i), up = load_as<decltype(kind)>(ups + i);
        return gate / (1.0f + exponential(-gate)) * up;
    });
}

}  // namespace baton
