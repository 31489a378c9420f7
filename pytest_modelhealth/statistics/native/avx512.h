/* What AVX-512 does better than compilers do it: the same operations in the same lanes, for floats. */

#include <immintrin.h>

/* `add_value` for floats, sixteen at a time; returns how many values that were. */
static inline int64_t add_vectors(const float *values, int64_t count, double pivot,
                                  Lanes_float *lanes) {
    __m512d sums[4], squares[4];
    __m512 low[2], high[2];
    const __m512d pivots = _mm512_set1_pd(pivot);
    const __m512 zero = _mm512_setzero_ps();
    int64_t start = 0, zeros = 0;
    for (int i = 0; i < 4; i++) {
        sums[i] = _mm512_loadu_pd(lanes->sums + 8 * i);
        squares[i] = _mm512_loadu_pd(lanes->squares + 8 * i);
    }
    for (int i = 0; i < 2; i++) {
        low[i] = _mm512_loadu_ps(lanes->low + 16 * i);
        high[i] = _mm512_loadu_ps(lanes->high + 16 * i);
    }
    for (; start + LANES <= count; start += LANES) {
        const float *from = values + start;
        for (int i = 0; i < 4; i++) { /* read as doubles: cheaper than to widen a register */
            __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(from + 8 * i));
            if (pivot) {
                wide = _mm512_sub_pd(wide, pivots);
                sums[i] = _mm512_add_pd(sums[i], wide);
                squares[i] = _mm512_add_pd(squares[i], _mm512_mul_pd(wide, wide));
            } else { /* exact squares: rounded once, as without fused multiply-add */
                sums[i] = _mm512_add_pd(sums[i], wide);
                squares[i] = _mm512_fmadd_pd(wide, wide, squares[i]);
            }
        }
        for (int i = 0; i < 2; i++) {
            __m512 value = _mm512_loadu_ps(from + 16 * i);
            zeros += __builtin_popcount(_mm512_cmp_ps_mask(value, zero, _CMP_EQ_OQ));
            low[i] = _mm512_min_ps(value, low[i]);
            high[i] = _mm512_max_ps(value, high[i]);
        }
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_pd(lanes->sums + 8 * i, sums[i]);
        _mm512_storeu_pd(lanes->squares + 8 * i, squares[i]);
    }
    for (int i = 0; i < 2; i++) {
        _mm512_storeu_ps(lanes->low + 16 * i, low[i]);
        _mm512_storeu_ps(lanes->high + 16 * i, high[i]);
    }
    lanes->zeros[0] += (int32_t)zeros;
    return start;
}

/* Bring what sixteen lanes gathered of each of sixteen runs to one lane a run. */
#define FOLD(name, fold)                                                                         \
    static inline __m512 name(__m512 v[RUNS]) {                                                  \
        for (int i = 0; i < 8; i++)                                                              \
            v[i] = fold(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),                      \
                        _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));                     \
        for (int i = 0; i < 4; i++)                                                              \
            v[i] = fold(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),                      \
                        _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xDD));                     \
        for (int i = 0; i < 2; i++)                                                              \
            v[i] = fold(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),                              \
                        _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));                             \
        v[0] = fold(_mm512_shuffle_ps(v[0], v[1], 0x44), _mm512_shuffle_ps(v[0], v[1], 0xEE));   \
        return _mm512_permutexvar_ps(                                                            \
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v[0]);      \
    }
FOLD(fold_low, _mm512_min_ps)
FOLD(fold_high, _mm512_max_ps)
#undef FOLD

/* Add up to sixteen neighbouring runs to their extremes. */
static void add_whole_runs_vectors(const float *values, int64_t run, int64_t count, float *low,
                                   float *high) {
    __m512 lows[RUNS], highs[RUNS];
    __mmask16 some = run < RUNS ? (__mmask16)((1 << run) - 1) : 0xFFFF;
    for (int64_t i = 0; i < count; i++) { /* the last load overlaps the one before */
        const float *from = values + i * run, *last = run < RUNS ? from : from + run - RUNS;
        __m512 least = _mm512_mask_loadu_ps(_mm512_set1_ps(*from), some, last), most = least;
        for (; from < last; from += RUNS) {
            __m512 value = _mm512_loadu_ps(from);
            least = _mm512_min_ps(value, least);
            most = _mm512_max_ps(value, most);
        }
        lows[i] = least;
        highs[i] = most;
    }
    for (int64_t i = count; i < RUNS; i++) lows[i] = highs[i] = _mm512_setzero_ps();
    __mmask16 taken = (__mmask16)((1 << count) - 1);
    __m512 least = fold_low(lows), most = fold_high(highs);
    least = _mm512_min_ps(least, _mm512_maskz_loadu_ps(taken, low));
    most = _mm512_max_ps(most, _mm512_maskz_loadu_ps(taken, high));
    _mm512_mask_storeu_ps(low, taken, least);
    _mm512_mask_storeu_ps(high, taken, most);
}

#define ADD_VECTORS add_vectors
#define ADD_WHOLE_RUNS add_whole_runs_vectors
