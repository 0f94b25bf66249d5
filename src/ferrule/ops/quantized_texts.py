"""The Metal bodies of products with quantized matrices.

Each serves all formats (`formats`), and all ways in which matrices are chosen (`gathers`). The
words in capitals that are no constants are put in by `quantized.Rule.body`:

* ``LEFT`` rows of a result; ``DEPTH``, what is summed over; ``WIDTH`` columns;
* ``CHOOSE`` finds the matrices of the result ``batch``;
* ``READ(n)`` makes floats of elements, which are in ``PACKED``; ``WHOLE`` is what sums are
  multiplied by, as `FINISH` says.
"""

from __future__ import annotations

# Elements from ``at`` on become the floats ``ws``, in an order in which PLACE(i) is that of i.
READ = """{
              const int units = COUNT / UNIT;
              const device uint* words = PACKED + at / UNIT * UNIT_WORDS;
              if (units == UNITS) read_units<T>(words, SCALES, UNITS, ws);
              else read_units<T>(words, SCALES, units, ws);
            }"""
# What is made of the sum of a column.
FINISH = "#define FINISH(sum, column) ((sum) * by)\n"
UNITS = """
// Whole elements begin and end with UNIT of them, which are UNIT_WORDS words.
#define UNIT_WORDS (32 % BITS == 0 ? 1 : BITS)
#define UNIT (UNIT_WORDS * 32 / BITS)
#define UNITS (PART / UNIT)

// PART elements, or the first units of them, as floats in another order: element i of unit u is at
// i * UNITS + u. So neighbours are in as many words, and are shifted alike: a processor's compiler
// makes vectors of that.
template <typename T, typename P, typename S>
inline void read_units(P words, S scales, S biases, int units, thread float* to) {
  float scale[UNITS], bias[UNITS], of_group[2 * PART / GROUP];
  const int groups = units * UNIT / GROUP;
  for (int g = 0; g < groups; g++) {
    of_group[g] = scale_of(scales[g]) * (E2M1_ELEMENTS ? 0.5f : 1.0f);
    of_group[PART / GROUP + g] = AFFINE ? scale_of(biases[g]) : 0.0f;
  }
  for (int u = 0; u < units; u++) {
    scale[u] = of_group[u * UNIT / GROUP];
    bias[u] = of_group[PART / GROUP + u * UNIT / GROUP];
  }
  for (int i = 0; i < UNIT; i++) {
    const int word = i * BITS / 32, shift = i * BITS % 32;
    const int two = shift + BITS > 32;  // words that it lies in, less one
    const uint keep = two ? ~0u : 0u;
    for (int u = 0; u < units; u++) {
      uint v = words[u * UNIT_WORDS + word] >> shift;
      if (32 % BITS != 0) v |= words[u * UNIT_WORDS + word + two] << ((32 - shift) & 31) & keep;
      v &= (1u << BITS) - 1;
      to[i * UNITS + u] =
          E2M1_ELEMENTS ? twice_e2m1(v) * scale[u] : value_of<T>(v, scale[u], bias[u]);
    }
  }
}
#define PLACE(i) ((i) % UNIT * UNITS + (i) / UNIT)
"""

# -- processors ---------------------------------------------------------------------------------

# A thread makes some rows of some columns. Rows whose matrix is the same share its elements, which
# become floats a part at a time.
_ROWS = """
    const ulong rows = ROW_COUNT, start = ulong(thread_position_in_grid.y) * ROWS;
    const ulong end = metal::min(start + ROWS, rows);
    for (ulong row = start; row < end;) {
      const device T* from[ROWS];
      long matrix = -1;
      int count = 0;
      for (; row + count < end; count++) {
        const ulong batch = (row + count) / LEFT, m = (row + count) % LEFT;
        CHOOSE
        const long chosen = inside ? from_right : -1;
        if (count > 0 && chosen != matrix) break;
        matrix = chosen;
        from[count] = x + (ulong(inside ? from_left : 0) * LEFT + m) * DEPTH;
      }
      PRODUCT
      row += count;
    }
"""
_NOTHING = """
      if (matrix < 0) {
        for (int r = 0; r < count; r++)
          for (int c = 0; c < columns; c++) y[(row + r) * WIDTH + first + c] = T(NAN);
      } else {
"""

# Rows of x, columns (rows of w) and elements of these that a thread has at once.
ROWS, COLUMNS, PART = 16, 64, 512

PROCESSOR = (
    f"""
#define ROWS {ROWS}
#define COLUMNS {COLUMNS}
#define PART {PART}
"""
    + """

template <int N>
inline float folded(thread float* v) {
  for (int l = 0; l < N / 2; l++) v[l] += v[l + N / 2];
  return folded<N / 2>(v);
}
template <>
inline float folded<1>(thread float* v) { return v[0]; }

// Sums of products of some rows with one column: in lanes, which are added up at last.
template <int R, int LANES>
inline void add_dots(const thread float* x, const thread float* w, int size, thread float* sums) {
  float lanes[R][LANES];
  for (int r = 0; r < R; r++)
    for (int l = 0; l < LANES; l++) lanes[r][l] = 0;
  for (int k = 0; k < size; k += LANES)
    for (int r = 0; r < R; r++)
      for (int l = 0; l < LANES; l++)
        lanes[r][l] = metal::fma(x[r * PART + k + l], w[k + l], lanes[r][l]);
  for (int r = 0; r < R; r++) sums[r * COLUMNS] += folded<LANES>(lanes[r]);
}
"""
)

# Columns of the result are rows of w.
PROCESSOR_TRANSPOSED = """
    const int first = int(thread_position_in_grid.x) * COLUMNS;
    const int columns = metal::min(int(WIDTH) - first, COLUMNS);
""" + _ROWS.replace(
    "PRODUCT",
    _NOTHING
    + """
        float sums[ROWS * COLUMNS], xs[ROWS * PART], ws[PART];
        for (int r = 0; r < count; r++)
          for (int c = 0; c < columns; c++) sums[r * COLUMNS + c] = 0;
        for (int k = 0; k < DEPTH; k += PART) {
          const int size = metal::min(int(DEPTH) - k, PART);
          if (size < PART) {
            for (int i = 0; i < count * PART; i++) xs[i] = 0;
            for (int i = 0; i < PART; i++) ws[i] = 0;
          }
          for (int r = 0; r < count; r++)
            for (int i = 0; i < size; i++) xs[r * PART + PLACE(i)] = float(from[r][k + i]);
          for (int c = 0; c < columns; c++) {
            const ulong at = (ulong(matrix) * WIDTH + first + c) * DEPTH + k;
            READ(size)
            int r = 0;
            for (; r + 4 <= count; r += 4)
              add_dots<4, 16>(xs + r * PART, ws, PART, sums + r * COLUMNS + c);
            for (; r < count; r++)
              add_dots<1, 32>(xs + r * PART, ws, PART, sums + r * COLUMNS + c);
          }
        }
        const float by = WHOLE;
        for (int r = 0; r < count; r++)
          for (int c = 0; c < columns; c++)
            y[(row + r) * WIDTH + first + c] =
                T(FINISH(sums[r * COLUMNS + c], first + c));
      }
""",
)

# Rows of w are added up, each by the elements of x.
PROCESSOR_STRAIGHT = """
    const int first = int(thread_position_in_grid.x) * PART;
    const int columns = metal::min(int(WIDTH) - first, PART);
""" + _ROWS.replace(
    "PRODUCT",
    _NOTHING
    + """
        float sums[ROWS * PART], parts[4 * PART];
        for (int i = 0; i < count * PART; i++) sums[i] = 0;
        for (int i = 0; i < 4 * PART; i++) parts[i] = 0;
        for (int k = 0; k < DEPTH; k += 4) {
          const int some = metal::min(int(DEPTH) - k, 4);
          for (int j = 0; j < some; j++) {
            const ulong at = (ulong(matrix) * DEPTH + k + j) * WIDTH + first;
            thread float* ws = parts + j * PART;
            READ(columns)
          }
          for (int i = some * PART; i < 4 * PART; i++) parts[i] = 0;
          for (int r = 0; r < count; r++) {
            float v[4];
            for (int j = 0; j < 4; j++) v[j] = j < some ? float(from[r][k + j]) : 0.0f;
            for (int c = 0; c < PART; c++) {
              float sum = sums[r * PART + c];
              for (int j = 0; j < 4; j++) sum = metal::fma(v[j], parts[j * PART + c], sum);
              sums[r * PART + c] = sum;
            }
          }
        }
        const float by = WHOLE;
        for (int r = 0; r < count; r++)
          for (int c = 0; c < columns; c++)
            y[(row + r) * WIDTH + first + c] =
                T(FINISH(sums[r * PART + PLACE(c)], first + c));
      }
""",
)

# -- GPUs ---------------------------------------------------------------------------------------

# A simdgroup makes one column of up to four rows.
SIMDGROUP = """
    const uint column = thread_position_in_grid.x / 32, lane = thread_index_in_simdgroup;
    const uint tiles = (uint(LEFT) + 3) / 4, top = thread_position_in_grid.y % tiles * 4;
    const ulong batch = thread_position_in_grid.y / tiles;
    const uint count = metal::min(uint(LEFT) - top, 4u);
    CHOOSE
    float sums[4] = {0, 0, 0, 0};
    float by = NAN;
    if (inside) {
      const long matrix = from_right;
      by = WHOLE;
      const ulong at = (ulong(matrix) * WIDTH + column) * DEPTH;
      const device T* rows = x + (ulong(from_left) * LEFT + top) * DEPTH;
      for (uint k = lane * 8; k < uint(DEPTH); k += 256) {
        uint q[8];
        read8((const device uchar*)PACKED + (at + k) / 8 * BITS, q);
        const ulong group = (at + k) / GROUP;
        const float scale = scale_of(scales[group]), bias = BIAS;
        for (int i = 0; i < 8; i++) {
          const float v = value_of<T>(q[i], scale, bias);
          for (uint r = 0; r < 4; r++)
            if (r < count) sums[r] += float(rows[r * ulong(DEPTH) + k + i]) * v;
        }
      }
    }
    for (uint r = 0; r < 4; r++) {
      const float sum = simd_sum(sums[r]);
      if (r < count && lane == 0)
        y[(batch * LEFT + top + r) * WIDTH + column] = T(FINISH(sum, column));
    }
"""

# A thread makes eight columns of a row.
EIGHT = """
    const uint column = thread_position_in_grid.x * 8, m = thread_position_in_grid.y;
    const ulong batch = thread_position_in_grid.z;
    CHOOSE
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    float by = NAN;
    if (inside) {
      const long matrix = from_right;
      by = WHOLE;
      const device T* row = x + (ulong(from_left) * LEFT + m) * DEPTH;
      for (uint k = 0; k < uint(DEPTH); k++) {
        const ulong at = (ulong(matrix) * DEPTH + k) * WIDTH + column, group = at / GROUP;
        uint q[8];
        read8((const device uchar*)PACKED + at / 8 * BITS, q);
        const float scale = scale_of(scales[group]), bias = BIAS, v = float(row[k]);
        for (int i = 0; i < 8; i++) sums[i] += v * value_of<T>(q[i], scale, bias);
      }
    }
    for (int i = 0; i < 8; i++)
      y[(batch * LEFT + m) * WIDTH + column + i] = T(FINISH(sums[i], column + i));
"""
