/* The fused kernel: every statistic of a tensor in one pass over its memory.
 *
 * A block of some thousand values is read into the first-level cache once, and everything is found there.
 * float16 and bfloat16 are widened to float, and strided values gathered, a block at a time.
 */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    USUAL_BLOCK = 4096, /* 16 kB of float */
    BLOCK = 8192,       /* the longest */
    LANES = 32,
    TABLES = 4,         /* several counts for a row: equal values do not wait for each other */
    LOWEST = -127,      /* LOWEST_EXPONENT and HIGHEST_EXPONENT of exponents.py */
    HIGHEST = 128,
    ROWS = 2 * (HIGHEST - LOWEST + 1), /* negative, positive, negative, ... */
};

enum Dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

typedef struct {
    const char *data;
    int dtype;
    int64_t count, dims; /* no dims: dense */
    const int64_t *sizes, *strides; /* in elements, widest stride first */
} Tensor;

/* Element i belongs to cell i / run % cells; `cells / count` of them are one unit. */
typedef struct {
    int64_t count, run, cells;
} Units;

typedef struct {
    double finite, nans, positive_infs, negative_infs, zeros, mean, deviations, low, high, sampled,
        lowest, highest;
} Summary;

typedef uint32_t Counts[TABLES][ROWS + 1]; /* the last one counts zeros, which have no row */

/* Copy `count` elements of `width` bytes from `position` on, in the order of the dimensions. */
static void gather(const Tensor *tensor, int64_t position, int64_t count, int width, char *to) {
    int64_t last = tensor->dims - 1, inner = tensor->sizes[last], step = tensor->strides[last];
    while (count) {
        int64_t within = position % inner, rest = position / inner, offset = within * step;
        for (int64_t dim = last - 1; dim >= 0; dim--) {
            offset += rest % tensor->sizes[dim] * tensor->strides[dim];
            rest /= tensor->sizes[dim];
        }
        int64_t length = inner - within < count ? inner - within : count;
        const char *from = tensor->data + offset * width;
        if (step == 1) memcpy(to, from, (size_t)(length * width));
        else
            for (int64_t i = 0; i < length; i++)
                memcpy(to + i * width, from + i * step * width, (size_t)width);
        to += length * width;
        position += length;
        count -= length;
    }
}

/* Return the elements from `position` on: where they lie, or gathered into `copied`. */
static const void *elements(const Tensor *tensor, int64_t position, int64_t count, int width,
                            void *copied) {
    if (!tensor->dims) return tensor->data + position * width;
    gather(tensor, position, count, width, copied);
    return copied;
}

static inline float of_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Scaling by 2**112 moves the exponent's bias and makes subnormals normal. */
static inline float of_float16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits |= sign | (magnitude >= 0x7C00u << 13 ? 0x7F800000u : 0);
    memcpy(&value, &bits, sizeof value);
    return value;
}

static const float *load_float(const Tensor *tensor, int64_t position, int64_t count,
                               float *copied) {
    if (tensor->dtype == FLOAT32) return elements(tensor, position, count, 4, copied);
    uint16_t gathered[BLOCK];
    const uint16_t *halves = elements(tensor, position, count, 2, gathered);
    if (tensor->dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) copied[i] = of_bfloat16(halves[i]);
    else
        for (int64_t i = 0; i < count; i++) copied[i] = of_float16(halves[i]);
    return copied;
}

static const double *load_double(const Tensor *tensor, int64_t position, int64_t count,
                                 double *copied) {
    return elements(tensor, position, count, 8, copied);
}

/* How many values to read from `element` on: what suits the units of the tensor. */
static int64_t block_length(const Units *units, int64_t element) {
    int64_t left = units->run - element % units->run, cells = units->cells;
    if (units->run >= 256) return left < USUAL_BLOCK ? left : USUAL_BLOCK;
    if (units->run > 1 || cells > BLOCK / 4) return USUAL_BLOCK;
    return cells > USUAL_BLOCK / 4 ? 4 * cells : USUAL_BLOCK / cells * cells; /* whole rows */
}

/* The row of a finite value; zeros have the one after the last. */
static inline int64_t row_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    int64_t row = 2 * (int64_t)(bits >> 23 & 255) + !(bits >> 31);
    return bits << 1 ? row : ROWS;
}

static inline int64_t row_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int64_t exponent = (int64_t)(bits >> 52 & 2047) - 1023;
    if (exponent < LOWEST) exponent = LOWEST;
    if (exponent > HIGHEST) exponent = HIGHEST;
    return bits << 1 ? 2 * (exponent - LOWEST) + !(bits >> 63) : ROWS;
}

#define REAL float
#define NAME(name) name##_float
#include "block.h"
#undef REAL
#undef NAME
#define REAL double
#define NAME(name) name##_double
#include "block.h"

/* Add up the tables and find the first and the last exponent that occur. */
static void add_rows(Counts counts, int64_t *rows, Summary *summary) {
    for (int row = 0; row < ROWS; row++) {
        rows[row] = 0;
        for (int table = 0; table < TABLES; table++) rows[row] += counts[table][row];
    }
    int first = 0, last = ROWS - 1;
    while (first < ROWS && !rows[first]) first++;
    while (last >= 0 && !rows[last]) last--;
    summary->lowest = LOWEST + first / 2;
    summary->highest = last < 0 ? LOWEST - 1 : LOWEST + last / 2;
}

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* A checksum of the sources, so that a test notices a library older than they are. */
EXPORT const char *modelhealth_source(void) { return SOURCE; }

/* Reduce a tensor.
 *
 * dims: of `sizes` and `strides` (elements, widest first); 0 for elements side by side.
 * unit_count, run, cell_count: element i belongs to cell i / run % cell_count; as many cells in a
 *     row make one unit as there are more cells than units.
 * one_in: how many values there are for each that enters the rows; 1 for all.
 * rows: room for ROWS.
 * cells: room for twice the cells, rounded up to 16; unit_low, unit_high: for the units, or NULL.
 */
EXPORT void modelhealth_reduce(const void *data, int dtype, int64_t count, int64_t dims,
                               const int64_t *sizes, const int64_t *strides, int64_t unit_count,
                               int64_t run, int64_t cell_count, int64_t one_in, Summary *summary,
                               int64_t *rows, void *cells, double *unit_low, double *unit_high) {
    Tensor tensor = {data, dtype, count, dims, sizes, strides};
    Units units = {unit_count, run, cell_count};
    Counts counts = {{0}};
    *summary = (Summary){.low = INFINITY, .high = -INFINITY};
    (dtype == FLOAT64 ? run_double : run_float)(&tensor, &units, one_in, counts, summary, cells,
                                                unit_low, unit_high);
    add_rows(counts, rows, summary);
}
