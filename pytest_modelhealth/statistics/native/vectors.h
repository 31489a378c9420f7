/* What vectors of AVX-512 and AVX2 do better than compilers do it: the same operations in the same
 * lanes, for floats. */

#include <immintrin.h>

/* Floats to fetch before they are read, to the second-level cache: it waits for more lines at once than the
 * first, and a tensor that was just written lies beyond both. */
enum { AHEAD = 1536 };

#ifdef __AVX512F__
typedef __m512 Floats;
typedef __m512d Doubles;
#define OF_FLOATS(name) _mm512_##name##_ps
#define OF_DOUBLES(name) _mm512_##name##_pd
#define WIDEN(from) _mm512_cvtps_pd(_mm256_loadu_ps(from))
#define HALVES(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define ZEROS(floats) _mm512_cmp_ps_mask(floats, _mm512_setzero_ps(), _CMP_EQ_OQ)
#else
typedef __m256 Floats;
typedef __m256d Doubles;
#define OF_FLOATS(name) _mm256_##name##_ps
#define OF_DOUBLES(name) _mm256_##name##_pd
#define WIDEN(from) _mm256_cvtps_pd(_mm_loadu_ps(from))
#define HALVES(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define ZEROS(floats) \
    (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(floats, _mm256_setzero_ps(), _CMP_EQ_OQ))
#endif

enum {
    WIDTH = sizeof(Floats) / 4,
    FLOATS = LANES / WIDTH, /* vectors of all lanes */
    DOUBLES = 2 * FLOATS,
};

typedef struct {
    Doubles sums[DOUBLES], squares[DOUBLES];
    int64_t zeros;
} Moments;

static inline Moments load_moments(const Lanes_float *lanes) {
    Moments moments = {.zeros = 0};
    for (int i = 0; i < DOUBLES; i++) {
        moments.sums[i] = OF_DOUBLES(loadu)(lanes->sums + i * WIDTH / 2);
        moments.squares[i] = OF_DOUBLES(loadu)(lanes->squares + i * WIDTH / 2);
    }
    return moments;
}

static inline void store_moments(const Moments *moments, Lanes_float *lanes) {
    for (int i = 0; i < DOUBLES; i++) {
        OF_DOUBLES(storeu)(lanes->sums + i * WIDTH / 2, moments->sums[i]);
        OF_DOUBLES(storeu)(lanes->squares + i * WIDTH / 2, moments->squares[i]);
    }
    lanes->zeros[0] += (int32_t)moments->zeros;
}

/* Add a value for each lane. */
static inline void add_lanes(const float *from, double pivot, Moments *moments) {
    for (int i = 0; i < DOUBLES; i++) { /* read as doubles: cheaper than to widen a register */
        Doubles wide = WIDEN(from + i * WIDTH / 2);
        if (pivot) {
            wide = OF_DOUBLES(sub)(wide, OF_DOUBLES(set1)(pivot));
            moments->sums[i] = OF_DOUBLES(add)(moments->sums[i], wide);
            moments->squares[i] = OF_DOUBLES(add)(moments->squares[i], OF_DOUBLES(mul)(wide, wide));
        } else { /* exact squares: rounded once, as without fused multiply-add */
            moments->sums[i] = OF_DOUBLES(add)(moments->sums[i], wide);
            moments->squares[i] = OF_DOUBLES(fmadd)(wide, wide, moments->squares[i]);
        }
    }
    for (int i = 0; i < FLOATS; i++)
        moments->zeros += __builtin_popcount(ZEROS(OF_FLOATS(loadu)(from + i * WIDTH)));
}

/* `add_row` for whole lanes; returns how many values that were. */
static inline int64_t add_row_vectors(const float *values, int64_t count, double pivot,
                                      bool extremes, Lanes_float *lanes) {
    Moments moments = load_moments(lanes);
    Floats low[FLOATS], high[FLOATS];
    for (int i = 0; i < FLOATS; i++) {
        low[i] = OF_FLOATS(loadu)(lanes->low + i * WIDTH);
        high[i] = OF_FLOATS(loadu)(lanes->high + i * WIDTH);
    }
    int64_t start = 0;
    for (; start + LANES <= count; start += LANES) {
        __builtin_prefetch(values + start + AHEAD, 0, 2);
        add_lanes(values + start, pivot, &moments);
        for (int i = 0; extremes && i < FLOATS; i++) {
            Floats value = OF_FLOATS(loadu)(values + start + i * WIDTH);
            low[i] = OF_FLOATS(min)(value, low[i]);
            high[i] = OF_FLOATS(max)(value, high[i]);
        }
    }
    store_moments(&moments, lanes);
    for (int i = 0; i < FLOATS; i++) {
        OF_FLOATS(storeu)(lanes->low + i * WIDTH, low[i]);
        OF_FLOATS(storeu)(lanes->high + i * WIDTH, high[i]);
    }
    return start;
}

/* `add_rows` for the whole lanes of rows; returns how many columns that were. */
static inline int64_t add_columns_vectors(const float *values, int64_t rows, int64_t stride,
                                          int64_t columns, double pivot, Lanes_float *lanes,
                                          float *low, float *high) {
    Moments moments = load_moments(lanes);
    int64_t whole_lanes = columns / LANES * LANES;
    for (; rows; rows--, values += stride)
        for (int64_t start = 0; start < whole_lanes; start += LANES) {
            __builtin_prefetch(values + start + AHEAD, 0, 2);
            add_lanes(values + start, pivot, &moments);
            for (int64_t i = start; i < start + LANES; i += WIDTH) {
                Floats value = OF_FLOATS(loadu)(values + i);
                OF_FLOATS(storeu)(low + i, OF_FLOATS(min)(value, OF_FLOATS(loadu)(low + i)));
                OF_FLOATS(storeu)(high + i, OF_FLOATS(max)(value, OF_FLOATS(loadu)(high + i)));
            }
        }
    store_moments(&moments, lanes);
    return whole_lanes;
}

/* Widen float16; returns how many values that were. */
static inline int64_t widen_float16_vectors(const uint16_t *halves, int64_t count, float *to) {
    int64_t start = 0;
    for (; start + WIDTH <= count; start += WIDTH)
        OF_FLOATS(storeu)(to + start, HALVES(halves + start));
    return start;
}

/* Bring what the lanes of as many vectors as a vector has gathered, of a run each, to one a run. */
#ifdef __AVX512F__
#define FOLD(name, fold)                                                                         \
    static inline __m512 name(__m512 v[WIDTH]) {                                                 \
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
#else
#define FOLD(name, fold)                                                                         \
    static inline __m256 name(__m256 v[WIDTH]) {                                                 \
        for (int i = 0; i < 4; i++)                                                              \
            v[i] = fold(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),                            \
                        _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));                           \
        for (int i = 0; i < 2; i++)                                                              \
            v[i] = fold(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),                              \
                        _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));                             \
        return fold(_mm256_shuffle_ps(v[0], v[1], 0x44), _mm256_shuffle_ps(v[0], v[1], 0xEE));   \
    }
#endif
FOLD(fold_low, OF_FLOATS(min))
FOLD(fold_high, OF_FLOATS(max))
#undef FOLD

/* The first vector of a run; of one that is shorter, its values and the first of them again. */
static inline Floats first_of_run(const float *from, int64_t run) {
    if (run >= WIDTH) return OF_FLOATS(loadu)(from);
    float values[WIDTH];
    for (int i = 0; i < WIDTH; i++) values[i] = from[i < run ? i : 0];
    return OF_FLOATS(loadu)(values);
}

/* Add as many neighbouring runs to their extremes as a vector has lanes, or fewer. */
static void add_some_runs(const float *values, int64_t run, int64_t count, float *low, float *high) {
    Floats lows[WIDTH], highs[WIDTH];
    float least[WIDTH], most[WIDTH];
    for (int64_t i = 0; i < count; i++) { /* the last vector overlaps the one before */
        const float *from = values + i * run, *last = run < WIDTH ? from : from + run - WIDTH;
        lows[i] = highs[i] = first_of_run(last, run);
        for (; from < last; from += WIDTH) {
            Floats value = OF_FLOATS(loadu)(from);
            lows[i] = OF_FLOATS(min)(value, lows[i]);
            highs[i] = OF_FLOATS(max)(value, highs[i]);
        }
    }
    for (int64_t i = count; i < WIDTH; i++) lows[i] = highs[i] = OF_FLOATS(setzero)();
    OF_FLOATS(storeu)(least, fold_low(lows));
    OF_FLOATS(storeu)(most, fold_high(highs));
    for (int64_t i = 0; i < count; i++) {
        low[i] = lesser_float(least[i], low[i]);
        high[i] = greater_float(most[i], high[i]);
    }
}

static void add_whole_runs_vectors(const float *values, int64_t run, int64_t count, float *low,
                                   float *high) {
    for (int64_t i = 0; i < count; i += WIDTH)
        add_some_runs(values + i * run, run, count - i < WIDTH ? count - i : WIDTH, low + i, high + i);
}

#define ADD_ROW add_row_vectors
#define ADD_COLUMNS add_columns_vectors
#define ADD_WHOLE_RUNS add_whole_runs_vectors
#define WIDEN_FLOAT16 widen_float16_vectors
