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

/* Counts by row. Zeros are in the rows of the least exponent, and for themselves: 0, -0. */
typedef struct {
    uint32_t tables[TABLES][ROWS];
    int64_t zeros[2];
} Counts;

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

static const float *load_float(const Tensor *tensor, int64_t position, int64_t count,
                               float *copied);

static const double *load_double(const Tensor *tensor, int64_t position, int64_t count,
                                 double *copied) {
    return elements(tensor, position, count, 8, copied);
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
static double positive_zero(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (!(bits << 1)) bits = 0;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The row of a finite value. */
static inline int64_t row_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 23; /* the exponent's bias makes LOWEST the first */
}

static inline int64_t row_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int64_t exponent = (int64_t)(bits >> 52 & 2047) - 1023;
    if (exponent < LOWEST) exponent = LOWEST;
    if (exponent > HIGHEST) exponent = HIGHEST;
    return exponent - LOWEST + (bits >> 63 ? EXPONENTS : 0);
}

#define REAL float
#define NAME(name) name##_float
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define VECTORS "vectors.h"
#else
#define ADD_ROW(values, count, pivot, extremes, lanes) 0
#define ADD_COLUMNS(values, columns, pivot, lanes, low, high) 0
#define ADD_WHOLE_RUNS add_whole_runs_float
#define WIDEN_FLOAT16(halves, count, to) 0
#endif
#include "block.h"

static const float *load_float(const Tensor *tensor, int64_t position, int64_t count,
                               float *copied) {
    if (tensor->dtype == FLOAT32) return elements(tensor, position, count, 4, copied);
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
#undef NAME
#undef VECTORS
#undef ADD_ROW
#undef ADD_COLUMNS
#undef ADD_WHOLE_RUNS

#define REAL double
#define NAME(name) name##_double
#define ADD_ROW(values, count, pivot, extremes, lanes) 0
#define ADD_COLUMNS(values, columns, pivot, lanes, low, high) 0
#define ADD_WHOLE_RUNS add_whole_runs_double
#include "block.h"

/* A job: one tensor to reduce; as `native.Job` packs it. */
typedef struct {
    int64_t address, dtype, count, dims, /* dims: of `sizes` and strides; 0 for dense memory */
        sizes,                           /* address of the sizes, then the strides */
        units, run, cells,               /* units: 0 where their extremes are not wanted */
        one_in,                          /* how many values there are for each in the histogram */
        part,                            /* about as many elements are summarized by themselves */
        samples;                         /* slices of dense memory to compare; 0 for none */
} Job;

/* A result, in words of 8 bytes; as `native.Found` unpacks it. After it come the units' least values,
 * their greatest, whether each is alive, a byte each, and the rows of the histogram. */
typedef struct {
    int64_t words, out_of_range, nans, positive_infs, negative_infs, zeros, finite;
    double mean, std, min, max;
    int64_t is_sampled, lowest, rows, units, remarks;
} Result;

enum { RESULT_WORDS = sizeof(Result) / 8 };

/* What to act on as soon as a tensor is read: bits of `remarks`, as in `native`. */
enum { OUT_OF_RANGE = 1, NOT_ALL_FINITE = 2, EQUAL_SAMPLES = 4, REMARKS_FROM_BIT = 48 };

#ifdef __linux__
/* The OpenMP runtime that torch brought into the process: its threads are there, and spin for a while
 * after torch's own work, so that threads of our own would only take their cores. */
#define WEAK __attribute__((weak)) /* NULL where there is none */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) WEAK;
extern int omp_get_thread_num(void) WEAK, omp_get_num_threads(void) WEAK, omp_in_parallel(void) WEAK;

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

static bool can_share(void) {
    return GOMP_parallel && omp_get_thread_num && omp_get_num_threads && omp_in_parallel &&
           !omp_in_parallel();
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
static bool can_share(void) { return false; }

static int64_t share_out(void (*work)(const Reading *, int64_t, int64_t), const Reading *reading,
                         int64_t threads) {
    work(reading, 0, threads);
    return threads;
}
#endif

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
    int64_t low = row_double(summary->low), high = row_double(summary->high);
    bool low_missed = summary->low && !rows[low];
    bool high_missed = summary->high && high != low && !rows[high];
    scale_rows(rows, summary->finite - summary->zeros - low_missed - high_missed, sampled);
    if (low_missed) rows[low] = 1;
    if (high_missed) rows[high] = 1;
}

/* Write the rows from the first filled exponent to the last, negative values first, and say which. */
static void keep_rows(const int64_t *rows, Result *result, int64_t *to) {
    int first = 0, last = EXPONENTS - 1;
    while (first < EXPONENTS && !(rows[first] | rows[EXPONENTS + first])) first++;
    while (last >= first && !(rows[last] | rows[EXPONENTS + last])) last--;
    for (int exponent = first; exponent <= last; exponent++) {
        *to++ = rows[EXPONENTS + exponent];
        *to++ = rows[exponent];
    }
    result->lowest = last < first ? 0 : LOWEST + first;
    result->rows = last - first + 1;
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


/* How many threads read a tensor: one where the extremes of its cells are much of the work. */
static int64_t count_threads(const Job *job, int64_t threads) {
    bool is_worth_it = job->count >= 2 * job->part && job->cells <= job->count / 8;
    return is_worth_it && can_share() ? threads : 1;
}

/* Count for each row what all threads have. */
static void add_counts(const Share *shares, int64_t threads, int64_t *rows) {
    memset(rows, 0, ROWS * sizeof *rows);
    for (int64_t thread = 0; thread < threads; thread++) {
        const Counts *more = &shares[thread].counts;
        for (int row = 0; row < ROWS; row++)
            for (int table = 0; table < TABLES; table++) rows[row] += more->tables[table][row];
        rows[0] -= more->zeros[0];
        rows[EXPONENTS] -= more->zeros[1];
    }
}

enum Outcome { READ, NO_MEMORY, SPOILT };

/* Read a tensor; SPOILT where it is to be read again with the finite values apart. */
static enum Outcome read_tensor(const Job *job, int64_t one_in, bool is_apart, int64_t threads,
                                Summary *summary, int64_t *rows, double *unit_low,
                                double *unit_high) {
    const int64_t *sizes = (const int64_t *)(intptr_t)job->sizes;
    Tensor tensor = {(const char *)(intptr_t)job->address, (int)job->dtype, job->count, job->dims,
                     sizes, sizes + job->dims};
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
        shares[thread] = (Share){.is_spoilt = false};
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
        add_counts(shares, threads, rows);
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

static void reduce_job(const Job *job, int64_t threads, Result *result) {
    int64_t room = whole(job->units, 8), rows[ROWS], counted = 0;
    double *low = (double *)result + RESULT_WORDS, *high = low + room;
    uint8_t *alive = (uint8_t *)(high + room);
    int64_t *kept = (int64_t *)(alive + whole(job->units, 64));
    Summary found;
    threads = count_threads(job, threads);
    bool is_apart = false;
    enum Outcome outcome = read_tensor(job, job->one_in, false, threads, &found, rows, low, high);
    if (outcome == SPOILT) {
        is_apart = true;
        outcome = read_tensor(job, job->one_in, true, threads, &found, rows, low, high);
    }
    bool is_sampled = outcome == READ && found.sampled < found.finite;
    int64_t nonzero = found.finite - found.zeros;
    for (int row = 0; row < ROWS; row++) counted += rows[row];
    if (is_sampled && counted < (nonzero < ENOUGH_NONZERO ? nonzero : ENOUGH_NONZERO)) {
        outcome = read_tensor(job, 1, is_apart, threads, &found, rows, low, high);
        is_sampled = false;
    }
    is_sampled = is_sampled && nonzero;
    if (is_sampled) complete_sample(rows, counted, &found);
    bool any = found.finite;
    *result = (Result){
        .out_of_range = outcome != READ || (job->dtype == FLOAT64 && is_out_of_range(&found)),
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
    keep_rows(rows, result, kept);
    result->words = whole(kept + 2 * result->rows - (int64_t *)result, 8);
    if (result->out_of_range) result->remarks |= OUT_OF_RANGE;
    if (result->finite != job->count) result->remarks |= NOT_ALL_FINITE;
    const void *data = (const void *)(intptr_t)job->address;
    if (job->samples && samples_are_equal(data, (int)job->dtype, job->samples, job->count))
        result->remarks |= EQUAL_SAMPLES;
}

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* A checksum of the sources, so that a test notices a library older than they are. */
EXPORT const char *modelhealth_source(void) { return SOURCE; }

/* Reduce tensors and write their results one after the other; return the words written.
 *
 * Room is needed for each job's RESULT_WORDS, twice its units rounded up to 8, its units rounded up to
 * 64 as bytes, and ROWS. places: where each result begins, in words from the first, and from
 * REMARKS_FROM_BIT on its remarks. threads: how many torch has for this thread, or 1.
 */
EXPORT int64_t modelhealth_reduce(const Job *jobs, int64_t count, int64_t *results,
                                  int64_t *places, int64_t threads) {
    int64_t words = 0;
    for (int64_t i = 0; i < count; i++) {
        Result *result = (Result *)(results + words);
        reduce_job(jobs + i, threads, result);
        places[i] = words | result->remarks << REMARKS_FROM_BIT;
        words += result->words;
    }
    return words;
}

/* Reduce the tensor at `data`, which `kind` describes but for its address.
 *
 * Returns the words written, and from REMARKS_FROM_BIT on the remarks.
 */
EXPORT int64_t modelhealth_reduce_one(const Job *kind, const void *data, Result *result,
                                      int64_t threads) {
    Job job = *kind;
    job.address = (int64_t)(intptr_t)data;
    reduce_job(&job, threads, result);
    return result->words | result->remarks << REMARKS_FROM_BIT;
}
