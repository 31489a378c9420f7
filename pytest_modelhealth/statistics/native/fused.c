/* The fused kernel: every statistic of a tensor in one pass over its memory.
 *
 * A block of some thousand values is read into the first-level cache once, and everything is found there.
 * float16 and bfloat16 are widened to float, and strided values gathered, a block at a time.
 *
 * Blocks make up parts, which torch's OpenMP threads may share; the result is the same to the last bit.
 */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = 8192, /* 32 kB of float */
    LANES = 16,
    FEW_LANES = 8,  /* for the extremes of one run */
    STRIP = 2048,   /* columns at a time of rows too wide for the first-level cache */
    MOST_CANCELLED = 64, /* squares may be this much more than deviations: 6 of 53 bits are lost */
    TABLES = 4,         /* several counts for a row: equal values do not wait for each other */
    LOWEST = -127,      /* LOWEST_EXPONENT and HIGHEST_EXPONENT of exponents.py */
    HIGHEST = 128,
    EXPONENTS = HIGHEST - LOWEST + 1,
    ROWS = 2 * EXPONENTS, /* of positive values, then of negative ones */
    ENOUGH_NONZERO = 1024, /* a sample with fewer says little: all values are counted then */
};

enum Dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

#include "samples.h"

typedef struct {
    const char *data;
    int dtype;
    int64_t count, dims; /* no dims: dense */
    const int64_t *sizes, *strides; /* in elements, widest stride first */
    const char *less;               /* what is subtracted from each element, dense too, or NULL */
} Tensor;

/* Element i belongs to cell i / run % cells; `cells / count` of them are one unit. */
typedef struct {
    int64_t count, run, cells;
} Units;

typedef struct {
    int64_t finite, nans, positive_infs, negative_infs, zeros, sampled;
    double mean, deviations, low, high;
} Summary;

static const Summary NOTHING = {.low = INFINITY, .high = -INFINITY};

/* Counts by row, of the exponents from `first` to `last`: all others are left as they lie in memory, since
 * to clear them takes longer than to count a small tensor. Zeros are in the rows of the least exponent;
 * once these count, `zeros` has how many they have of each: 0, -0. */
typedef struct {
    uint32_t tables[TABLES][ROWS];
    int64_t zeros[2], first, last;
} Counts;

/* Count the exponents from `first` to `last` as well; none where `first` is greater. */
static void widen(Counts *counts, int64_t first, int64_t last) {
    if (first > counts->first) first = counts->first;
    if (last < counts->last) last = counts->last;
    for (int64_t exponent = first; exponent <= last; exponent++)
        for (int table = 0; table < TABLES; table++)
            if (exponent < counts->first || exponent > counts->last)
                counts->tables[table][exponent] = counts->tables[table][EXPONENTS + exponent] = 0;
    if (!first && counts->first) counts->zeros[0] = counts->zeros[1] = 0;
    counts->first = first;
    counts->last = last;
}

/* What a thread gathers, in any order: counts, and the extremes of cells, or NULL. */
typedef struct {
    Counts counts;
    void *low, *high;
    bool is_spoilt; /* by a value that is not finite, before the thread came to its end */
} Share;

/* A tensor to read in parts, each summarized by itself so that they can be merged in order. */
typedef struct {
    const Tensor *tensor;
    const Units *units;
    int64_t one_in, length, parts; /* length: of a part */
    bool is_apart;                 /* whether not all values are finite */
    Summary *summaries;            /* of each part */
    Share *shares;                 /* of each thread */
} Reading;

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

static inline uint64_t bits_double(double value);
static const float *load_float(const Tensor *tensor, int64_t position, int64_t count,
                               float *copied);

static const double *load_double(const Tensor *tensor, int64_t position, int64_t count,
                                 double *copied) {
    const double *values = elements(tensor, position, count, 8, copied);
    if (!tensor->less) return values;
    const double *less = (const double *)tensor->less + position;
    for (int64_t i = 0; i < count; i++) copied[i] = values[i] - less[i];
    return copied;
}

static int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

/* Add what another part of the tensor showed (Chan, Golub and LeVeque 1979, as in moments.py). */
static void merge(Summary *summary, const Summary *part) {
    if (part->finite) {
        double gap = part->mean - summary->mean;
        double share = (double)part->finite / (double)(summary->finite + part->finite);
        summary->mean += gap * share;
        summary->deviations += part->deviations + gap * gap * ((double)summary->finite * share);
        if (part->low < summary->low) summary->low = part->low;
        if (part->high > summary->high) summary->high = part->high;
    }
    summary->finite += part->finite;
    summary->nans += part->nans;
    summary->positive_infs += part->positive_infs;
    summary->negative_infs += part->negative_infs;
    summary->zeros += part->zeros;
    summary->sampled += part->sampled;
}

/* Whether extremes of columns leave the first-level cache before their next row comes. */
static bool is_wide(const Units *units) { return units->cells > BLOCK / 4; }

/* What to read at once: `rows` pieces of neighbouring rows, and the position after them. */
typedef struct {
    int64_t rows, columns, next;
} Shape;

static Shape strip_shape(const Units *units, int64_t position, int64_t end) {
    int64_t cells = units->cells, column = position % cells, row = position - column;
    int64_t rows = (end - row) / cells < 4 ? (end - row) / cells : 4;
    int64_t columns = rows == 1 ? BLOCK : STRIP;
    if (columns > cells - column) columns = cells - column;
    bool ends = column + columns == cells;
    return (Shape){rows, columns, ends ? row + rows * cells : position + columns};
}

/* The tile at `position`, as it suits the units: whole rows, whole runs, or a strip of four rows. */
static Shape tile_shape(const Units *units, int64_t position, int64_t end) {
    int64_t run = units->run, cells = units->cells, length;
    if (run == 1 && is_wide(units)) return strip_shape(units, position, end);
    if (run >= BLOCK / 4) length = run - position % run;
    else if (run > 1) length = BLOCK / run * run;
    else length = BLOCK / cells * cells;
    if (length > BLOCK) length = BLOCK;
    if (length > end - position) length = end - position;
    return (Shape){1, length, position + length};
}

/* The length of a part: about `wanted`, and whole tiles. */
static int64_t part_length(const Units *units, int64_t wanted) {
    if (units->run == 1) return whole(wanted, is_wide(units) ? 4 * units->cells : units->cells);
    return units->run > wanted / 4 ? wanted : whole(wanted, units->run);
}

/* Make zeros positive: which of two comes out as the lesser depends on the CPU. */
static double positive_zero(double value) { return bits_double(value) << 1 ? value : 0.0; }

/* The row of a finite value, by its bits. */
static inline int64_t row_float(uint32_t bits) {
    return bits >> 23; /* the exponent's bias makes LOWEST the first */
}

static inline int64_t row_double(uint64_t bits) {
    int64_t exponent = (int64_t)(bits >> 52 & 2047) - 1023;
    if (exponent < LOWEST) exponent = LOWEST;
    if (exponent > HIGHEST) exponent = HIGHEST;
    return exponent - LOWEST + (bits >> 63 ? EXPONENTS : 0);
}

#define REAL float
#define BITS uint32_t
#define NAME(name) name##_float
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define VECTORS "vectors.h"
#else
#define ADD_ROW(values, count, pivot, extremes, lanes) 0
#define ADD_COLUMNS(values, rows, stride, columns, pivot, lanes, low, high) 0
#define ADD_WHOLE_RUNS add_whole_runs_float
#define WIDEN_FLOAT16(halves, count, to) 0
#endif
#include "block.h"

static const float *load_float(const Tensor *tensor, int64_t position, int64_t count,
                               float *copied) {
    if (tensor->dtype == FLOAT32) {
        const float *values = elements(tensor, position, count, 4, copied);
        if (!tensor->less) return values;
        const float *less = (const float *)tensor->less + position;
        for (int64_t i = 0; i < count; i++) copied[i] = values[i] - less[i];
        return copied;
    }
    uint16_t gathered[BLOCK];
    const uint16_t *halves = elements(tensor, position, count, 2, gathered);
    if (tensor->dtype == BFLOAT16) {
        for (int64_t i = 0; i < count; i++) copied[i] = of_bfloat16(halves[i]);
    } else {
        int64_t start = WIDEN_FLOAT16(halves, count, copied);
        for (; start < count; start++) copied[start] = of_float16(halves[start]);
    }
    return copied;
}
#undef REAL
#undef BITS
#undef NAME
#undef VECTORS
#undef ADD_ROW
#undef ADD_COLUMNS
#undef ADD_WHOLE_RUNS

#define REAL double
#define BITS uint64_t
#define NAME(name) name##_double
#define ADD_ROW(values, count, pivot, extremes, lanes) 0
#define ADD_COLUMNS(values, rows, stride, columns, pivot, lanes, low, high) 0
#define ADD_WHOLE_RUNS add_whole_runs_double
#include "block.h"

/* A tensor as DLPack 1 describes it (`DLTensor`); strides in elements. */
typedef struct {
    const char *data;
    int32_t device_type, device_id, dims;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
} Description;

enum { ON_CPU = 1, FLOATING = 2, BRAIN_FLOATING = 4 }; /* `kDLCPU`, `kDLFloat`, `kDLBfloat` */

enum { MOST_DIMS = 16 }; /* a tensor with more is not read */

/* How to read a tensor. */
typedef struct {
    const char *data, *less; /* as `Tensor` */
    int64_t dtype, count, units, cells, run, /* units: 0 where their extremes are not wanted */
        one_in,                              /* how many values there are for each in the histogram */
        part,                                /* about as many elements are summarized by themselves */
        samples,                             /* slices of dense memory to compare; 0 for none */
        room,                                /* for the result, in words, at most */
        unit_dim, rank, shape[MOST_DIMS],    /* as the tensor has them; -1 for no units */
        dims,                                /* of sizes and strides; 0 for dense memory */
        sizes[MOST_DIMS], strides[MOST_DIMS];
} Job;

/* What is the same for all tensors that one thread reads: as `native._Reader` has it. */
typedef struct {
    int (*describe)(void *, Description *); /* NULL: a description is what is given */
    int64_t *page, words, used, first_place;
    int64_t exact, least_sampled, most_skipped, part;
    int64_t threads, process; /* that read a large tensor, 0 for as many as torch uses; in which */
    int64_t room;             /* that the last result needed, in words, at most */
} Reader;

/* A result, in words of 8 bytes; as `native._RESULT` unpacks it. After it come the units' least
 * values, their greatest, whether each is alive, a byte each, the rows of the histogram, the shape. */
typedef struct {
    int64_t words, form, nans, positive_infs, negative_infs, zeros, finite;
    double mean, std, min, max;
    int64_t is_sampled, lowest, rows, units, remarks;
} Result;

enum { RESULT_WORDS = sizeof(Result) / 8 };

/* What to act on as soon as a tensor is read: bits of `remarks`, as in `native`. */
enum { NOT_ALL_FINITE = 1, COMPARED_SAMPLES = 2, EQUAL_SAMPLES = 4, OUT_OF_RANGE = 8 };
enum { REMARKS_FROM_BIT = 56 };

#ifdef __linux__
#include <unistd.h>

/* The OpenMP runtime that torch brought into the process: its threads are there, and spin for a while
 * after torch's own work, so that threads of our own would only take their cores. */
#define WEAK __attribute__((weak)) /* NULL where there is none */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) WEAK;
extern int omp_get_thread_num(void) WEAK, omp_get_num_threads(void) WEAK, omp_in_parallel(void) WEAK,
    omp_get_max_threads(void) WEAK;

typedef struct {
    void (*work)(const Reading *, int64_t, int64_t);
    const Reading *reading;
    int64_t threads;
} Team;

static void in_team(void *shared) {
    Team *team = shared;
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (!thread) team->threads = threads;
    team->work(team->reading, thread, threads);
}

/* How many threads may read a tensor. In a forked process it is one, as the runtime would wait forever
 * for threads that stayed with the parent. */
static int64_t count_available(const Reader *reader) {
    bool is_there = GOMP_parallel && omp_get_thread_num && omp_get_num_threads && omp_in_parallel &&
                    omp_get_max_threads;
    if (!is_there || omp_in_parallel() || getpid() != reader->process) return 1;
    return reader->threads ? reader->threads : omp_get_max_threads();
}

/* Call `work` in up to `threads` threads, each with its number and how many there are; return that. */
static int64_t share_out(void (*work)(const Reading *, int64_t, int64_t), const Reading *reading,
                         int64_t threads) {
    Team team = {work, reading, 1};
    if (threads > 1) GOMP_parallel(in_team, &team, (unsigned)threads, 0);
    else work(reading, 0, 1);
    return team.threads;
}
#else
static int64_t count_available(const Reader *reader) {
    (void)reader;
    return 1;
}

static int64_t share_out(void (*work)(const Reading *, int64_t, int64_t), const Reading *reading,
                         int64_t threads) {
    work(reading, 0, threads);
    return threads;
}
#endif

/* The histogram: counts by row of exponents from `first` to `last`; of a sample they are all. */
typedef struct {
    int64_t rows[ROWS], first, last;
} Histogram;

/* Scale a sample to `total` values; what rounding cuts goes to the fullest row. */
static void scale_rows(int64_t *rows, int64_t total, int64_t sampled) {
    double scale = (double)total / (double)sampled;
    int64_t scaled = 0;
    int fullest = 0;
    for (int row = 0; row < ROWS; row++) {
        if (!rows[row]) continue;
        rows[row] = (int64_t)((double)rows[row] * scale);
        scaled += rows[row];
        if (rows[row] > rows[fullest]) fullest = row;
    }
    rows[fullest] += total - scaled;
}

/* Make a sample's rows stand for all values, with one in the rows of the extremes at least. */
static void complete_sample(int64_t *rows, int64_t sampled, const Summary *summary) {
    int64_t low = row_double(bits_double(summary->low)), high = row_double(bits_double(summary->high));
    bool low_missed = summary->low && !rows[low];
    bool high_missed = summary->high && high != low && !rows[high];
    scale_rows(rows, summary->finite - summary->zeros - low_missed - high_missed, sampled);
    if (low_missed) rows[low] = 1;
    if (high_missed) rows[high] = 1;
}

/* Write the rows from the first filled exponent to the last, negative values first, and say which. */
static void keep_rows(const Histogram *histogram, Result *result, int64_t *to) {
    const int64_t *positive = histogram->rows, *negative = positive + EXPONENTS;
    int64_t first = histogram->first, last = histogram->last;
    while (first <= last && !(positive[first] | negative[first])) first++;
    while (first <= last && !(positive[last] | negative[last])) last--;
    if (first <= last) result->lowest = LOWEST + first;
    for (; first <= last; first++, result->rows++) {
        *to++ = negative[first];
        *to++ = positive[first];
    }
}

/* A unit is alive that was ever more than 2**-20 of the largest magnitude (DEAD_RATIO of units.py),
 * and one with a NaN. */
static void find_alive(const double *low, const double *high, int64_t units, double abs_max,
                       uint8_t *alive) {
    double limit = 0x1p-20 * abs_max;
    for (int64_t unit = 0; unit < units; unit++) {
        double least = fabs(low[unit]), most = fabs(high[unit]);
        alive[unit] = !((least > most ? least : most) <= limit);
    }
}

static bool is_large(const Job *job) { return job->count >= 2 * job->part; }

/* How many threads read a tensor: one where the extremes of its cells are much of the work. */
static int64_t count_threads(const Reader *reader, const Job *job) {
    bool is_worth_it = is_large(job) && job->cells <= job->count / 8;
    return is_worth_it ? count_available(reader) : 1;
}

/* Count for each row what all threads have, of all exponents or of those that they have. */
static void add_counts(const Share *shares, int64_t threads, bool all, Histogram *histogram) {
    int64_t *rows = histogram->rows, first = all ? 0 : EXPONENTS, last = all ? EXPONENTS - 1 : -1;
    for (int64_t thread = 0; thread < threads; thread++) {
        if (shares[thread].counts.first < first) first = shares[thread].counts.first;
        if (shares[thread].counts.last > last) last = shares[thread].counts.last;
    }
    for (int64_t row = first; row <= last; row++) rows[row] = rows[EXPONENTS + row] = 0;
    for (int64_t thread = 0; thread < threads; thread++) {
        const Counts *more = &shares[thread].counts;
        for (int64_t row = more->first; row <= more->last; row++)
            for (int table = 0; table < TABLES; table++) {
                rows[row] += more->tables[table][row];
                rows[EXPONENTS + row] += more->tables[table][EXPONENTS + row];
            }
        if (!more->first) rows[0] -= more->zeros[0], rows[EXPONENTS] -= more->zeros[1];
    }
    histogram->first = first;
    histogram->last = last;
}

enum Outcome { READ, NO_MEMORY, SPOILT };

/* Read a tensor; SPOILT where it is to be read again with the finite values apart. */
static enum Outcome read_tensor(const Job *job, int64_t one_in, bool is_apart, int64_t threads,
                                Summary *summary, Histogram *histogram, double *unit_low,
                                double *unit_high) {
    Tensor tensor = {job->data,  (int)job->dtype, job->count, job->dims,
                     job->sizes, job->strides,    job->less};
    Units units = {job->units, job->run, job->cells};
    int64_t length = part_length(&units, job->part), parts = (job->count + length - 1) / length;
    int64_t own = units.count ? 8 * whole(units.cells, 16) : 0; /* bytes; aligned for vectors */
    int64_t room = parts * (int64_t)sizeof(Summary) + threads * ((int64_t)sizeof(Share) + 2 * own);
    double few[BLOCK];
    char *memory = room > (int64_t)sizeof few ? malloc((size_t)room) : (char *)few;
    if (!memory) return NO_MEMORY;
    Share *shares = (Share *)(memory + 2 * own * threads);
    for (int64_t thread = 0; thread < threads; thread++) {
        char *low = memory + 2 * own * thread;
        shares[thread].is_spoilt = false;
        shares[thread].counts.first = EXPONENTS;
        shares[thread].counts.last = -1;
        shares[thread].low = own ? low : NULL;
        shares[thread].high = own ? low + own : NULL;
    }
    Reading reading = {&tensor, &units,   one_in, length,
                       parts,   is_apart, (Summary *)(shares + threads), shares};
    bool is_double = job->dtype == FLOAT64;
    threads = share_out(is_double ? read_parts_double : read_parts_float, &reading, threads);
    enum Outcome outcome = READ;
    for (int64_t thread = 0; thread < threads; thread++)
        if (shares[thread].is_spoilt) outcome = SPOILT;
    if (outcome == READ) {
        *summary = NOTHING;
        for (int64_t part = 0; part < parts; part++) merge(summary, reading.summaries + part);
        (is_double ? fold_double : fold_float)(&reading, threads, unit_low, unit_high);
        add_counts(shares, threads, one_in > 1, histogram);
        for (int64_t unit = 0; !is_apart && unit < units.count; unit++) {
            if (unit_low[unit] < summary->low) summary->low = unit_low[unit];
            if (unit_high[unit] > summary->high) summary->high = unit_high[unit];
        }
    }
    if (memory != (char *)few) free(memory);
    return outcome;
}

/* Whether a square left the range of float64. */
static bool is_out_of_range(const Summary *summary) {
    double abs_max = -summary->low > summary->high ? -summary->low : summary->high;
    return summary->finite && abs_max && !(0x1p-450 < abs_max && abs_max < 0x1p500);
}

static void reduce_job(const Reader *reader, const Job *job, Result *result) {
    int64_t room = whole(job->units, 8), counted = 0, threads = count_threads(reader, job);
    double *low = (double *)result + RESULT_WORDS, *high = low + room;
    uint8_t *alive = (uint8_t *)(high + room);
    int64_t *kept = (int64_t *)(alive + whole(job->units, 64));
    Summary found;
    Histogram histogram;
    bool is_apart = false;
    enum Outcome outcome = read_tensor(job, job->one_in, false, threads, &found, &histogram, low, high);
    if (outcome == SPOILT) {
        is_apart = true;
        outcome = read_tensor(job, job->one_in, true, threads, &found, &histogram, low, high);
    }
    bool is_sampled = outcome == READ && found.sampled < found.finite;
    int64_t nonzero = found.finite - found.zeros;
    for (int row = 0; is_sampled && row < ROWS; row++) counted += histogram.rows[row];
    if (is_sampled && counted < (nonzero < ENOUGH_NONZERO ? nonzero : ENOUGH_NONZERO)) {
        outcome = read_tensor(job, 1, is_apart, threads, &found, &histogram, low, high);
        is_sampled = false;
    }
    is_sampled = is_sampled && nonzero;
    if (is_sampled) complete_sample(histogram.rows, counted, &found);
    bool any = found.finite;
    *result = (Result){
        .form = job->dtype | job->rank << 8 | (job->unit_dim + 1) << 16,
        .nans = found.nans,
        .positive_infs = found.positive_infs,
        .negative_infs = found.negative_infs,
        .zeros = found.zeros,
        .finite = found.finite,
        .mean = any ? found.mean : NAN,
        .std = any ? sqrt(found.deviations / (double)found.finite) : NAN,
        .min = any ? positive_zero(found.low) : NAN,
        .max = any ? positive_zero(found.high) : NAN,
        .is_sampled = is_sampled,
        .units = job->units,
    };
    double abs_max = fabs(result->min) > fabs(result->max) ? fabs(result->min) : fabs(result->max);
    find_alive(low, high, job->units, abs_max, alive);
    if (outcome == READ) keep_rows(&histogram, result, kept);
    int64_t *shape = kept + 2 * result->rows;
    memcpy(shape, job->shape, (size_t)job->rank * sizeof *shape);
    result->words = whole(shape + job->rank - (int64_t *)result, 8);
    if (outcome != READ || (job->dtype == FLOAT64 && is_out_of_range(&found)))
        result->remarks |= OUT_OF_RANGE;
    if (result->finite != job->count) result->remarks |= NOT_ALL_FINITE;
    if (job->samples > 1) {
        result->remarks |= COMPARED_SAMPLES;
        if (samples_are_equal(job->data, (int)job->dtype, job->samples, job->count))
            result->remarks |= EQUAL_SAMPLES;
    }
}

/* Tell the dtype; -1 for one that is not read. */
static int dtype_of(const Description *tensor) {
    if (tensor->lanes != 1) return -1;
    if (tensor->code == BRAIN_FLOATING) return tensor->bits == 16 ? BFLOAT16 : -1;
    if (tensor->code != FLOATING) return -1;
    switch (tensor->bits) {
    case 16: return FLOAT16;
    case 32: return FLOAT32;
    case 64: return FLOAT64;
    default: return -1;
    }
}

/* Write the dimensions in the order of memory, widest stride first; of a contiguous tensor as they
 * are, whatever strides those of a single element have. */
static void order_dims(const Description *tensor, int *order) {
    int64_t step = 1;
    bool is_contiguous = true;
    for (int dim = tensor->dims - 1; dim >= 0; dim--) {
        if (tensor->shape[dim] != 1) is_contiguous &= tensor->strides[dim] == step;
        step *= tensor->shape[dim];
    }
    for (int dim = 0; dim < tensor->dims; dim++) {
        int at = dim;
        if (!is_contiguous)
            for (; at && tensor->strides[order[at - 1]] < tensor->strides[dim]; at--)
                order[at] = order[at - 1];
        order[at] = dim;
    }
}

/* Join neighbouring dimensions that are one in memory, so that rows are as long as can be. */
static void join_dims(const Description *tensor, const int *order, Job *job) {
    int64_t *sizes = job->sizes, *strides = job->strides, last = 0;
    sizes[0] = strides[0] = 1;
    for (int at = 0; at < tensor->dims; at++) {
        int64_t size = tensor->shape[order[at]], stride = tensor->strides[order[at]];
        if (size == 1) continue;
        if (sizes[last] == 1 || strides[last] == size * stride) {
            sizes[last] *= size;
            strides[last] = stride;
        } else {
            sizes[++last] = size;
            strides[last] = stride;
        }
    }
    job->dims = !last && strides[0] == 1 ? 0 : last + 1;
}

enum { SHORT_RUN = 16, MANY_CELLS = 1 << 16 }; /* their extremes stay in the second-level cache */

/* Say which elements are of one unit; short runs are quicker with a cell for each element. */
static void find_units(const Description *tensor, const int *order, Job *job) {
    job->units = 0;
    job->cells = job->run = 1;
    if (job->unit_dim < 0) return;
    int64_t run = 1;
    int at = tensor->dims - 1;
    for (; order[at] != job->unit_dim; at--) run *= tensor->shape[order[at]];
    job->units = job->cells = tensor->shape[job->unit_dim];
    job->run = run;
    if (run < SHORT_RUN && job->units * run <= MANY_CELLS) {
        job->cells *= run;
        job->run = 1;
    }
}

enum { NO_UNITS = INT32_MIN };

/* Decide how to read a tensor; return false for one that is not read as it lies in memory.
 *
 * unit_dim: the dimension of the units, or `NO_UNITS`. samples: compare the samples of a tensor that
 * has as many in its outermost dimension. */
static bool plan(const Reader *reader, const Description *tensor, int64_t unit_dim, int64_t samples,
                 Job *job) {
    int dtype = dtype_of(tensor), order[MOST_DIMS], outermost = 0;
    if (!tensor->data || tensor->device_type != ON_CPU || dtype < 0) return false;
    if (tensor->dims > MOST_DIMS) return false;
    if (unit_dim != NO_UNITS) {
        if (unit_dim < 0) unit_dim += tensor->dims;
        if (unit_dim < 0 || unit_dim >= tensor->dims) return false; /* the caller's fault */
    }
    job->data = tensor->data + tensor->byte_offset;
    job->less = NULL;
    job->dtype = dtype;
    job->rank = tensor->dims;
    job->unit_dim = unit_dim == NO_UNITS ? -1 : unit_dim;
    job->part = reader->part;
    job->count = 1;
    for (int dim = 0; dim < tensor->dims; dim++)
        job->count *= job->shape[dim] = tensor->shape[dim];
    if (!job->count) return false;
    order_dims(tensor, order);
    join_dims(tensor, order, job);
    find_units(tensor, order, job);
    while (outermost < tensor->dims && tensor->shape[order[outermost]] == 1) outermost++;
    bool has_samples = outermost < tensor->dims && !order[outermost] && *tensor->shape == samples;
    job->samples = has_samples && !job->dims ? samples : 0;
    int64_t skipped = job->count / reader->least_sampled;
    if (skipped > reader->most_skipped) skipped = reader->most_skipped;
    job->one_in = job->count <= reader->exact ? 1 : skipped;
    job->room = RESULT_WORDS + 2 * whole(job->units, 8) + whole(job->units, 64) / 8 + ROWS + job->rank;
    job->room = whole(job->room, 8);
    return true;
}

enum { NOT_READ = -1, NO_ROOM = -2 };

/* Write the result of a job to the page; return its place and remarks, or `NOT_READ`. */
static int64_t reduce(Reader *reader, const Job *job) {
    Result *result = (Result *)(reader->page + reader->used);
    reduce_job(reader, job, result);
    if (result->remarks & OUT_OF_RANGE) return NOT_READ;
    int64_t place = reader->first_place + reader->used;
    reader->used += result->words;
    return place | result->remarks << REMARKS_FROM_BIT;
}

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* A checksum of the sources, so that a test notices a library older than they are. */
EXPORT const char *modelhealth_source(void) { return SOURCE; }

/* What is called of Python, by the names that it has there. `native` fills in where each is: linked to
 * none, one library serves all versions. */
EXPORT struct {
    long long (*PyLong_AsLongLong)(void *);
    void *(*PyLong_FromLongLong)(long long);
    void *(*PyErr_Occurred)(void);
    void *(*PyEval_SaveThread)(void);
    void (*PyEval_RestoreThread)(void *);
} modelhealth_python;

/* Have one tensor subtracted from another as it is read; return false where they do not lie alike in
 * dense memory, or are of halves, whose differences are rounded. */
static bool subtract(const Description *tensor, const Description *less, Job *job) {
    bool is_alike = less->data && less->device_type == ON_CPU && less->dims == tensor->dims;
    for (int dim = 0; is_alike && dim < tensor->dims; dim++)
        is_alike = less->shape[dim] == tensor->shape[dim] && less->strides[dim] == tensor->strides[dim];
    job->less = is_alike ? less->data + less->byte_offset : NULL;
    return is_alike && !job->dims && dtype_of(less) == job->dtype && job->dtype <= FLOAT64;
}

/* Read one tensor: a function of Python (METH_FASTCALL), which costs a fifth of a call through ctypes.
 *
 * Its `self` is the address of a reader. It takes the tensor, or the address of a description where the
 * reader asks nobody for one, the dimension of units or `NO_UNITS`, samples to compare or 0, and where
 * that is wanted a tensor to subtract from it.
 *
 * Returns where the result is, or why there is none: the tensor is not read as it lies in memory, or the
 * page has no room for it. A large one is read without the GIL. */
EXPORT void *modelhealth_read(void *self, void *const *given, intptr_t count) {
    Reader *reader = (Reader *)(intptr_t)modelhealth_python.PyLong_AsLongLong(self);
    int64_t unit_dim = modelhealth_python.PyLong_AsLongLong(given[1]);
    int64_t samples = modelhealth_python.PyLong_AsLongLong(given[2]), found = NOT_READ;
    Description own, less, *described = &own;
    if (!reader->describe)
        described = (Description *)(intptr_t)modelhealth_python.PyLong_AsLongLong(given[0]);
    else if (reader->describe(given[0], &own)) return NULL; /* with an exception */
    if (count > 3 && reader->describe(given[3], &less)) return NULL;
    if ((unit_dim == -1 || samples == -1) && modelhealth_python.PyErr_Occurred()) return NULL;
    Job job;
    bool is_read = plan(reader, described, unit_dim, samples, &job);
    if (is_read && (count < 4 || subtract(described, &less, &job))) {
        reader->room = job.room;
        void *thread = NULL;
        if (reader->used + job.room > reader->words) found = NO_ROOM;
        else {
            if (is_large(&job)) thread = modelhealth_python.PyEval_SaveThread();
            found = reduce(reader, &job);
            if (thread) modelhealth_python.PyEval_RestoreThread(thread);
        }
    }
    return modelhealth_python.PyLong_FromLongLong(found);
}
