/* What is done with values a block at a time; included once for each REAL.
 *
 * Sums run in LANES separate lanes whose order is fixed here and not by the compiler, so that every
 * CPU gives the same bits. The loops over lanes are what compilers turn into vector instructions.
 */

/* A piece of memory to read at once: `rows` of `columns` values, `stride` apart. */
typedef struct {
    const REAL *values;
    int64_t rows, columns, stride;
} NAME(Tile);

typedef struct {
    double mean, deviations; /* mean, sum of squared deviations from it */
    int64_t zeros;
    REAL low, high;
} NAME(Block);

typedef struct {
    double sums[LANES], squares[LANES];
    int32_t zeros[LANES];
    REAL low[LANES], high[LANES];
} NAME(Lanes);

static inline BITS NAME(bits)(REAL value) {
    BITS bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline REAL NAME(lesser)(REAL a, REAL b) { return a < b ? a : b; }
static inline REAL NAME(greater)(REAL a, REAL b) { return a > b ? a : b; }

static inline void NAME(add_moments)(REAL value, int lane, double pivot, NAME(Lanes) *lanes) {
    double deviation = value - pivot;
    lanes->sums[lane] += deviation;
    lanes->squares[lane] += deviation * deviation;
    lanes->zeros[lane] += value == 0;
}

static inline void NAME(add_extremes)(REAL value, REAL *low, REAL *high) {
    *low = NAME(lesser)(value, *low);
    *high = NAME(greater)(value, *high);
}

#ifdef VECTORS
#include VECTORS
#endif

/* Add a row to the lanes, deviations taken from `pivot`; vectors leave `extremes` out if not wanted. */
static __attribute__((noinline)) void NAME(add_row)(const REAL *values, int64_t count, double pivot,
                                                    bool extremes, NAME(Lanes) *lanes) {
    int64_t start = ADD_ROW(values, count, pivot, extremes, lanes);
    (void)extremes;
#ifndef VECTORS
    if (count >= LANES) {
        NAME(Lanes) own = *lanes; /* where compilers keep it in registers */
        for (; start + LANES <= count; start += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                NAME(add_moments)(values[start + lane], lane, pivot, &own);
                NAME(add_extremes)(values[start + lane], own.low + lane, own.high + lane);
            }
        *lanes = own;
    }
#endif
    for (int lane = 0; start + lane < count; lane++) {
        NAME(add_moments)(values[start + lane], lane, pivot, lanes);
        NAME(add_extremes)(values[start + lane], lanes->low + lane, lanes->high + lane);
    }
}

/* Add rows to the lanes and to the extremes of their columns. */
static __attribute__((noinline)) void NAME(add_rows)(const REAL *restrict values, int64_t rows,
                                                     int64_t stride, int64_t columns, double pivot,
                                                     NAME(Lanes) *restrict lanes, REAL *restrict low,
                                                     REAL *restrict high) {
    bool is_even = columns % LANES == 0; /* otherwise each row ends with lanes that go without */
    if (is_even && ADD_COLUMNS(values, rows, stride, columns, pivot, lanes, low, high)) return;
    for (; rows; rows--, values += stride) {
        int64_t start = ADD_COLUMNS(values, 1, stride, columns, pivot, lanes, low, high);
        NAME(add_row)(values + start, columns - start, pivot, false, lanes);
        for (int64_t i = start; i < columns; i++) NAME(add_extremes)(values[i], low + i, high + i);
    }
}

/* Add rows of few columns: LANES of them side by side make one of many. */
static void NAME(add_short_rows)(const REAL *values, int64_t rows, int64_t columns, double pivot,
                                 NAME(Lanes) *lanes, REAL *low, REAL *high) {
    REAL lows[LANES * LANES], highs[LANES * LANES];
    int64_t width = LANES * columns, joined = rows / LANES;
    for (int64_t i = 0; i < width; i++) {
        lows[i] = low[i % columns];
        highs[i] = high[i % columns];
    }
    NAME(add_rows)(values, joined, width, width, pivot, lanes, lows, highs);
    for (int64_t i = 0; i < width; i++) {
        low[i % columns] = NAME(lesser)(lows[i], low[i % columns]);
        high[i % columns] = NAME(greater)(highs[i], high[i % columns]);
    }
    values += joined * width;
    NAME(add_rows)(values, rows - joined * LANES, columns, columns, pivot, lanes, low, high);
}

/* Add a tile of columns to the lanes, and to the extremes of its columns. */
static void NAME(add_columns)(const NAME(Tile) *tile, const Units *units, double pivot,
                              NAME(Lanes) *lanes, REAL *low, REAL *high) {
    int64_t cells = units->cells;
    if (is_wide(units))
        NAME(add_rows)(tile->values, tile->rows, tile->stride, tile->columns, pivot, lanes, low, high);
    else if (cells < LANES)
        NAME(add_short_rows)(tile->values, tile->columns / cells, cells, pivot, lanes, low, high);
    else
        NAME(add_rows)(tile->values, tile->columns / cells, cells, cells, pivot, lanes, low, high);
}

/* Which extremes of a tile are gathered together with its moments. */
typedef struct {
    bool of_all;
    const Units *columns; /* NULL, or units of which each column has a cell */
    REAL *low, *high;     /* of these cells */
} NAME(Extremes);

/* Add a tile to lanes, and all lanes to the first. */
static void NAME(add_tile)(const NAME(Tile) *tile, double pivot, const NAME(Extremes) *extremes,
                           NAME(Lanes) *lanes) {
    *lanes = (NAME(Lanes)){{0}, {0}, {0}, {0}, {0}};
    for (int lane = 0; lane < LANES; lane++) {
        lanes->low[lane] = INFINITY;
        lanes->high[lane] = -INFINITY;
    }
    if (extremes->columns)
        NAME(add_columns)(tile, extremes->columns, pivot, lanes, extremes->low, extremes->high);
    else
        for (int64_t row = 0; row < tile->rows; row++)
            NAME(add_row)(tile->values + row * tile->stride, tile->columns, pivot, extremes->of_all,
                          lanes);
    for (int half = LANES / 2; half; half /= 2) {
        for (int lane = 0; lane < half; lane++) {
            lanes->sums[lane] += lanes->sums[lane + half];
            lanes->squares[lane] += lanes->squares[lane + half];
            lanes->zeros[lane] += lanes->zeros[lane + half];
            lanes->low[lane] = NAME(lesser)(lanes->low[lane], lanes->low[lane + half]);
            lanes->high[lane] = NAME(greater)(lanes->high[lane], lanes->high[lane + half]);
        }
    }
}

/* Summarize a tile, deviations taken from *pivot; false where a value is not finite.
 *
 * Squares of floats are exact in float64, so that a pivot of 0 loses digits only where the mean is
 * large beside the deviations. Then the tile is read again, and *pivot becomes a better one.
 */
static bool NAME(summarize)(const NAME(Tile) *tile, double *pivot, const NAME(Extremes) *extremes,
                            NAME(Block) *block) {
    NAME(Lanes) lanes;
    double count = (double)(tile->rows * tile->columns), sum, shift, deviations;
    for (;;) {
        NAME(add_tile)(tile, *pivot, extremes, &lanes);
        sum = lanes.sums[0];
        shift = sum / count;
        deviations = lanes.squares[0] - sum * shift;
        bool is_exact = deviations * MOST_CANCELLED >= lanes.squares[0];
        if (!isfinite(sum) || sizeof(REAL) == 8 || *pivot || is_exact) break;
        *pivot = (REAL)shift;
        if (!*pivot) break;
    }
    *block = (NAME(Block)){*pivot + shift, deviations > 0 ? deviations : 0, lanes.zeros[0],
                           lanes.low[0], lanes.high[0]};
    bool is_finite = isfinite(sum);
    if (is_finite && (sizeof(REAL) == 8 || *pivot)) *pivot = (REAL)block->mean;
    return is_finite;
}

/* Count what is not finite; copy the rest to `finite` and return how many that are. */
static int64_t NAME(take_finite)(const REAL *values, int64_t count, REAL *finite, Summary *summary) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        REAL value = values[i];
        if (isfinite(value)) finite[kept++] = value;
        else if (isnan(value)) summary->nans++;
        else if (value > 0) summary->positive_infs++;
        else summary->negative_infs++;
    }
    return kept;
}

static void NAME(add_block)(Summary *summary, const NAME(Block) *block, int64_t count) {
    merge(summary, &(Summary){.finite = count,
                              .zeros = block->zeros,
                              .mean = block->mean,
                              .deviations = block->deviations,
                              .low = block->low,
                              .high = block->high});
}

/* Lower *low to the least of the values and raise *high to the greatest. */
static void NAME(run_extremes)(const REAL *values, int64_t count, REAL *low, REAL *high) {
    REAL least[FEW_LANES], most[FEW_LANES];
    if (count < FEW_LANES) {
        for (int64_t i = 0; i < count; i++) {
            *low = NAME(lesser)(values[i], *low);
            *high = NAME(greater)(values[i], *high);
        }
        return;
    }
    const REAL *last = values + count - FEW_LANES; /* overlaps the values before */
    for (int lane = 0; lane < FEW_LANES; lane++) least[lane] = most[lane] = last[lane];
    for (; values < last; values += FEW_LANES) {
        for (int lane = 0; lane < FEW_LANES; lane++) {
            least[lane] = NAME(lesser)(values[lane], least[lane]);
            most[lane] = NAME(greater)(values[lane], most[lane]);
        }
    }
    for (int half = FEW_LANES / 2; half; half /= 2) {
        for (int lane = 0; lane < half; lane++) {
            least[lane] = NAME(lesser)(least[lane], least[lane + half]);
            most[lane] = NAME(greater)(most[lane], most[lane + half]);
        }
    }
    *low = NAME(lesser)(least[0], *low);
    *high = NAME(greater)(most[0], *high);
}

/* The slow way for a block with NaNs: a unit that had one keeps NaN for good. */
static void NAME(careful_extremes)(const REAL *values, int64_t count, int64_t position,
                                   const Units *units, REAL *low, REAL *high) {
    for (int64_t i = 0; i < count; i++) {
        int64_t cell = (position + i) / units->run % units->cells;
        REAL value = values[i];
        if (isnan(value) || isnan(low[cell])) {
            low[cell] = high[cell] = (REAL)NAN;
        } else {
            low[cell] = NAME(lesser)(value, low[cell]);
            high[cell] = NAME(greater)(value, high[cell]);
        }
    }
}

#ifndef VECTORS
/* Add whole neighbouring runs to their extremes. */
static void NAME(add_whole_runs)(const REAL *values, int64_t run, int64_t count, REAL *low,
                                 REAL *high) {
    for (int64_t i = 0; i < count; i++)
        NAME(run_extremes)(values + i * run, run, low + i, high + i);
}
#endif

/* Add values that lie side by side to the extremes of their units. */
static void NAME(add_runs)(const REAL *values, int64_t count, int64_t position, const Units *units,
                           REAL *low, REAL *high) {
    int64_t run = units->run, cells = units->cells, cell = position / run % cells;
    int64_t left = run - position % run;
    while (count) {
        int64_t whole_runs = left == run ? count / run : 0;
        if (whole_runs) {
            if (whole_runs > cells - cell) whole_runs = cells - cell;
            ADD_WHOLE_RUNS(values, run, whole_runs, low + cell, high + cell);
            values += whole_runs * run;
            count -= whole_runs * run;
            cell += whole_runs;
        } else {
            int64_t length = left < count ? left : count;
            NAME(run_extremes)(values, length, low + cell, high + cell);
            values += length;
            count -= length;
            left = run;
            cell++;
        }
        if (cell == cells) cell = 0;
    }
}

/* Add a tile of runs to the extremes of its units. */
static void NAME(add_units)(const NAME(Tile) *tile, const NAME(Block) *block, int64_t position,
                            const Units *units, REAL *low, REAL *high) {
    int64_t run = units->run, cell = position / run % units->cells;
    if (position % run + tile->columns > run) {
        NAME(add_runs)(tile->values, tile->columns, position, units, low, high);
        return;
    }
    low[cell] = NAME(lesser)(block->low, low[cell]);
    high[cell] = NAME(greater)(block->high, high[cell]);
}

/* Count what is not finite in a tile, and make it one of the rest, copied to `finite`. */
static void NAME(set_finite_apart)(NAME(Tile) *tile, int64_t position, const Units *units,
                                   REAL *finite, REAL *low, REAL *high, Summary *summary) {
    int64_t kept = 0;
    for (int64_t row = 0; row < tile->rows; row++) {
        const REAL *values = tile->values + row * tile->stride;
        int64_t at = position + row * units->cells; /* tiles of several rows are of columns */
        if (low) NAME(careful_extremes)(values, tile->columns, at, units, low, high);
        kept += NAME(take_finite)(values, tile->columns, finite + kept, summary);
    }
    *tile = (NAME(Tile)){finite, 1, kept, kept};
}

/* Count signs and exponents; and zeros, which have the row of the least exponent, for themselves. */
static void NAME(count_exponents)(const REAL *values, int64_t count, Counts *counts) {
    BITS zeros = 0, negative_zeros = 0, least = (BITS)-1, most = 0;
    for (int64_t i = 0; i < count; i++) {
        BITS bits = NAME(bits)(values[i]), size = bits << 1; /* the sign left out */
        zeros += values[i] == 0; /* subnormals as well, where torch flushes them */
        negative_zeros += values[i] == 0 && bits != size >> 1;
        least = size - 1 < least ? size - 1 : least; /* to which a zero is the greatest */
        most = size > most ? size : most;
    }
    widen(counts, NAME(row)(least >> 1), NAME(row)(most >> 1));
    counts->zeros[0] += zeros - negative_zeros;
    counts->zeros[1] += negative_zeros;
    int64_t start = 0;
    for (; start + TABLES <= count; start += TABLES)
        for (int table = 0; table < TABLES; table++)
            counts->tables[table][NAME(row)(NAME(bits)(values[start + table]))]++;
    for (; start < count; start++) counts->tables[0][NAME(row)(NAME(bits)(values[start]))]++;
}

/* Count a window of each row, which a fixed generator chooses. */
static void NAME(sample)(const NAME(Tile) *tile, int64_t one_in, uint64_t *random, Share *share,
                         Summary *summary) {
    int64_t columns = tile->columns, window = (columns + one_in - 1) / one_in;
    for (int64_t row = 0; row < tile->rows; row++) {
        const REAL *values = tile->values + row * tile->stride;
        *random ^= *random << 13, *random ^= *random >> 7, *random ^= *random << 17;
        values += (int64_t)((*random >> 32) % (uint64_t)(columns - window + 1));
        NAME(count_exponents)(values, window, &share->counts);
        summary->sampled += window;
    }
}

/* Bring the tile at `position` into reach: where it lies, or copied side by side. */
static NAME(Tile) NAME(load_tile)(const Tensor *tensor, const Units *units, int64_t position,
                                  const Shape *shape, REAL *copied) {
    int64_t rows = shape->rows, columns = shape->columns;
    const REAL *values = NAME(load)(tensor, position, columns, copied);
    if (values != copied) return (NAME(Tile)){values, rows, columns, units->cells};
    for (int64_t row = 1; row < rows; row++)
        NAME(load)(tensor, position + row * units->cells, columns, copied + row * columns);
    return (NAME(Tile)){copied, rows, columns, columns};
}

/* Find the moments of a tile and the extremes of its units; false where a value is not finite.
 *
 * Where all are finite, the extremes of cells tell those of the tensor. Otherwise it is read again,
 * and those of the finite values gathered apart.
 */
static bool NAME(look)(const NAME(Tile) *tile, int64_t position, const Reading *reading,
                       const Share *share, double *pivot, NAME(Block) *block) {
    const Units *units = reading->units;
    NAME(Extremes) of_all = {.of_all = true};
    NAME(Extremes) of_columns = {.columns = units, .low = share->low, .high = share->high};
    if (is_wide(units)) {
        of_columns.low += position % units->cells;
        of_columns.high += position % units->cells;
    }
    bool are_runs = share->low && units->run > 1, are_columns = share->low && !are_runs;
    bool are_some = are_runs && position % units->run + tile->columns > units->run;
    NAME(Extremes) wanted = of_all;
    if (!reading->is_apart && are_columns) wanted = of_columns;
    if (!reading->is_apart && are_some) wanted.of_all = false;
    if (!NAME(summarize)(tile, pivot, &wanted, block)) return false;
    if (are_runs) NAME(add_units)(tile, block, position, units, share->low, share->high);
    if (are_columns && reading->is_apart) {
        double unused = 0;
        NAME(summarize)(tile, &unused, &of_columns, &(NAME(Block)){0});
    }
    return true;
}

/* Read a part of a tensor; false where it is to be read again, finite values apart. */
static bool NAME(read_part)(const Reading *reading, int64_t position, int64_t end, Share *share,
                            Summary *summary) {
    const Units *units = reading->units;
    REAL copied[BLOCK], finite[BLOCK];
    uint64_t random = 0x9E3779B97F4A7C15 * (uint64_t)(position + 1); /* for a size always the same */
    double pivot = 0;
    while (position < end) {
        Shape shape = tile_shape(units, position, end);
        NAME(Tile) tile = NAME(load_tile)(reading->tensor, units, position, &shape, copied);
        NAME(Block) block;
        if (sizeof(REAL) == 8 && !pivot && isfinite(tile.values[0])) pivot = tile.values[0];
        if (!NAME(look)(&tile, position, reading, share, &pivot, &block)) {
            if (share->low && !reading->is_apart) return false;
            NAME(set_finite_apart)(&tile, position, units, finite, share->low, share->high, summary);
            double first = sizeof(REAL) == 8 ? finite[0] : 0;
            if (tile.columns)
                NAME(summarize)(&tile, &first, &(NAME(Extremes)){.of_all = true}, &block);
        }
        if (tile.columns) {
            NAME(add_block)(summary, &block, tile.rows * tile.columns);
            NAME(sample)(&tile, reading->one_in, &random, share, summary);
        }
        position = shape.next;
    }
    return true;
}

/* Read a thread's share of the parts: neighbours, as torch's threads wrote them. What was written last
 * comes first, as it is what the second-level cache still has, and the next operation begins with the
 * first of it. */
static void NAME(read_parts)(const Reading *reading, int64_t thread, int64_t threads) {
    Share *share = reading->shares + thread;
    REAL *low = share->low, *high = share->high;
    for (int64_t cell = 0; low && cell < reading->units->cells; cell++) {
        low[cell] = INFINITY;
        high[cell] = -INFINITY;
    }
    int64_t first = reading->parts * thread / threads, count = reading->tensor->count;
    for (int64_t part = reading->parts * (thread + 1) / threads; part-- > first;) {
        int64_t start = part * reading->length, left = count - start;
        int64_t end = start + (left < reading->length ? left : reading->length);
        Summary summary = NOTHING;
        share->is_spoilt = !NAME(read_part)(reading, start, end, share, &summary);
        if (share->is_spoilt) return;
        reading->summaries[part] = summary;
    }
}

/* Add the extremes of cells that another thread found; NaN stays. */
static void NAME(merge_cells)(const Share *from, int64_t cells, REAL *low, REAL *high) {
    const REAL *lows = from->low, *highs = from->high;
    for (int64_t cell = 0; cell < cells; cell++) {
        bool is_ill = lows[cell] != lows[cell];
        low[cell] = is_ill ? lows[cell] : NAME(lesser)(lows[cell], low[cell]);
        high[cell] = is_ill ? highs[cell] : NAME(greater)(highs[cell], high[cell]);
    }
}

/* Fold cells of all threads to units, `cells / count` of them each, widened to double. */
static void NAME(fold)(const Reading *reading, int64_t threads, double *unit_low,
                       double *unit_high) {
    const Units *units = reading->units;
    REAL *low = reading->shares->low, *high = reading->shares->high;
    if (!low) return;
    for (int64_t thread = 1; thread < threads; thread++)
        NAME(merge_cells)(reading->shares + thread, units->cells, low, high);
    int64_t width = units->cells / units->count;
    for (int64_t unit = 0; unit < units->count; unit++) {
        const REAL *lows = low + unit * width, *highs = high + unit * width;
        REAL least = lows[0], most = highs[0];
        bool is_ill = least != least;
        for (int64_t i = 1; i < width; i++) {
            is_ill |= lows[i] != lows[i];
            least = NAME(lesser)(lows[i], least);
            most = NAME(greater)(highs[i], most);
        }
        unit_low[unit] = is_ill ? NAN : positive_zero(least);
        unit_high[unit] = is_ill ? NAN : positive_zero(most);
    }
}
