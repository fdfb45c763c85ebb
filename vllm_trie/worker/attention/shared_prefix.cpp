// Attention of rows that share their first KV blocks, on the KV cache of vLLM's CPU backend; all sums are float32.
//
// The queries of a group are multiplied with the blocks that all of its rows share, a tile of queries at a time, as in
// a matrix product; then each row's queries with the row's own blocks, whose newest tokens may be a tree.
// One softmax runs through both, so there is nothing to merge. A block holds, for each KV head, its keys as
// [head_size, block_size], then its values as [block_size, head_size]: `Rows` of numbers of one type; or both in the
// order that AMX reads, as `Pairs`. MATRIX is one of these when compiled.py compiles and calls this.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16;
#define TILES 12, 8, 4, 2, 1  // queries of a tile: as many as there are registers for
#else
constexpr int LANES = 8;
#define TILES 4, 2, 1
#endif
constexpr int COLUMNS = 2 * LANES;  // of keys or values that a tile computes at a time; block sizes are multiples of it
constexpr int CHUNK = 256;          // keys between two rescalings of the sums; their blocks fit a core's L2 cache
constexpr int MOST_TILE = 12;
constexpr int MOST_QUERIES = 256;  // of one piece of work, so that their sums also stay in the L2 cache
constexpr int LINE = 64;           // bytes of a cache line
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.44269504088896341f;

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint16_t Words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

static inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
static inline void store(float* to, Floats x) { *reinterpret_cast<Floats*>(to) = x; }

// The greatest of the numbers, or their sum if `IS_SUM`.
template <bool IS_SUM>
static inline float reduced(Floats x) {
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int apart = LANES / 2; apart > 0; apart /= 2) {
    const Floats other = __builtin_shuffle(x, lane ^ apart);
    x = IS_SUM ? x + other : other > x ? other : x;
  }
  return x[0];
}

// 2 to the power of x <= 0, to a few parts in 10^7; at least 2^-126.
static inline Floats exp2(Floats x) {
  const Floats least = Floats{} - 126.0f, round = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds
  x = x > least ? x : least;
  const Floats shifted = x + round, f = x - (shifted - round);
  Floats y = Floats{} + 1.5403530e-4f;
  y = y * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  return (Floats)((Ints)y + ((Ints)shifted << 23));
}

// The number types of a model and its cache.
struct Float32 {
  typedef float Stored;
  static Floats load(const float* from) { return ::load(from); }
  static float widened(float x) { return x; }
  static float narrowed(float x) { return x; }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static Floats load(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Shorts*>(from), Ints) << 16);
  }
  static float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
  }
  static uint16_t narrowed(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

struct Float16 {
  typedef uint16_t Stored;
  static Floats load(const uint16_t* from) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  }
  static float widened(uint16_t x) { return _cvtsh_ss(x); }
  static uint16_t narrowed(float x) { return _cvtss_sh(x, 0); }
};

// A matrix [depth, columns], row by row. The other matrix of a product has numbers of type `Factor`.
template <class Number_>
struct Rows {
  using Number = Number_;
  using Stored = typename Number::Stored;
  using Factor = float;
  static constexpr int DEPTHS = 1;  // multiplied at a time
  const Stored* at;
  int64_t stride;

  static Rows keys(const Stored* block, int, int block_size, int token) { return {block + token, block_size}; }
  static Rows values(const Stored* block, int head_size, int, int token, int column) {
    return {block + token * head_size + column, head_size};
  }
  static Factor factor(Stored x) { return Number::widened(x); }
  static void store(Factor* to, Floats x) { ::store(to, x); }
  static Floats add(Floats sum, const Factor* a, Floats b) { return sum + *a * b; }

  template <bool IS_LAST>
  Floats load(int depth, int column) const {
    return Number::load(at + depth * stride + column);
  }
};

#ifdef __AVX512BF16__
// Multiplies pairs of bfloat16, and adds both products to a float32 sum.
struct ByTwo {
  using Number = BFloat16;
  using Factor = uint16_t;
  static constexpr int DEPTHS = 2;

  static Factor factor(uint16_t x) { return x; }
  static void store(Factor* to, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
  static Floats add(Floats sum, const Factor* a, __m512i b) {
    typedef int32_t Both __attribute__((aligned(2), may_alias));
    const __m512i factors = _mm512_set1_epi32(*reinterpret_cast<const Both*>(a));
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)factors, (__m512bh)b);
  }
};

template <>
struct Rows<BFloat16> : ByTwo {
  const uint16_t* at;
  int64_t stride;

  Rows(const uint16_t* at, int64_t stride) : at(at), stride(stride) {}
  static Rows keys(const uint16_t* block, int, int block_size, int token) { return {block + token, block_size}; }
  static Rows values(const uint16_t* block, int head_size, int, int token, int column) {
    return {block + token * head_size + column, head_size};
  }

  template <bool IS_LAST>
  __m512i load(int depth, int column) const {
    const __m256i* row = reinterpret_cast<const __m256i*>(at + depth * stride + column);
    const __m256i* next = reinterpret_cast<const __m256i*>(at + (depth + 1) * stride + column);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(row)),
                                            IS_LAST ? __m256i{} : _mm256_loadu_si256(next), 1);
    Words in_turn;
    for (int i = 0; i < 2 * LANES; ++i) in_turn[i] = i / 2 + i % 2 * LANES;
    return _mm512_permutexvar_epi16((__m512i)in_turn, both);
  }
};

// A matrix [depth, columns] as AMX reads it: groups of LANES columns, each with pairs of rows interleaved.
struct Pairs : ByTwo {
  const uint16_t* at;
  int64_t stride;  // between groups of columns

  Pairs(const uint16_t* at, int64_t stride) : at(at), stride(stride) {}
  static Pairs keys(const uint16_t* block, int head_size, int, int token) {
    return {block + token * head_size, LANES * head_size};
  }
  static Pairs values(const uint16_t* block, int, int block_size, int token, int column) {
    return {block + column * block_size + token * LANES, LANES * block_size};
  }

  template <bool IS_LAST>
  __m512i load(int depth, int column) const {
    const __m512i both = _mm512_loadu_si512(at + column / LANES * stride + depth * LANES);
    return IS_LAST ? both & _mm512_set1_epi32(0xffff) : both;
  }
};
#endif

// sum [R, V * LANES] += a [R, depth] times b [depth, V * LANES]; rows of a are a_row numbers apart.
template <int R, int V, class Matrix>
static inline __attribute__((always_inline)) void multiply(const typename Matrix::Factor* a, int64_t a_row,
                                                           const Matrix& b, int depth, Floats (&sum)[R][V]) {
  constexpr int PARTS = R >= 4 ? 1 : 4 / R;  // of the depth: few rows have too few sums to hide their latency
  constexpr int DEPTHS = Matrix::DEPTHS;
  Floats part[PARTS][R][V] = {};
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) part[0][r][v] = sum[r][v];
  const auto add = [&]<bool IS_LAST>(std::bool_constant<IS_LAST>, int k, int p) __attribute__((always_inline)) {
    decltype(b.template load<IS_LAST>(0, 0)) row[V];
    for (int v = 0; v < V; ++v) row[v] = b.template load<IS_LAST>(k, v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) part[p][r][v] = Matrix::add(part[p][r][v], a + r * a_row + k, row[v]);
  };
  int k = 0;
  for (; k + PARTS * DEPTHS <= depth; k += PARTS * DEPTHS)
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; ++p) add(std::false_type{}, k + p * DEPTHS, p);
  for (; k + DEPTHS <= depth; k += DEPTHS) add(std::false_type{}, k, 0);
  if (k < depth) add(std::true_type{}, k, 0);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      sum[r][v] = part[0][r][v];
      for (int p = 1; p < PARTS; ++p) sum[r][v] += part[p][r][v];
    }
}

// One KV head of the cache.
template <class Matrix>
struct Head {
  using Stored = typename Matrix::Number::Stored;
  const Stored* cache;
  int64_t block_stride;
  int block_size, head_size;

  const Stored* block(int32_t number) const { return cache + number * block_stride; }
  Matrix keys(int32_t number, int token) const { return Matrix::keys(block(number), head_size, block_size, token); }
  Matrix values(int32_t number, int token, int column) const {
    return Matrix::values(block(number) + block_size * head_size, head_size, block_size, token, column);
  }

  // Prefetches numbers [first, last) of a block into the L2 cache.
  void prefetch(int32_t number, int64_t first, int64_t last) const {
    for (int64_t at = first; at < last; at += LINE / sizeof(Stored)) __builtin_prefetch(block(number) + at, 0, 2);
  }
  int64_t size() const { return int64_t(2) * block_size * head_size; }
};

// Queries of one head, and their softmax so far: the sum of values, the greatest score, the sum of weights.
template <class Factor>
struct Queries {
  Factor* queries;
  float *sums, *top, *total;
  int head_size;
  int number;  // of the first query, as `Scoring` counts them

  Queries from(int first) const {
    const int at = first * head_size;
    return {queries + at, sums + at, top + first, total + first, head_size, number + first};
  }
};

// Keys [first, last) of a sequence in these blocks; at most CHUNK.
struct Keys {
  const int32_t* blocks;
  int first, last;
};

// How products of queries and keys are scored. A token sees keys [firsts, lengths) of its row; of those from
// `tree_starts` on, only the ones whose bits are set.
struct Scoring {
  float scale, soft_cap;  // 0 if there is none
  const int32_t *firsts, *lengths, *tree_starts;
  const uint64_t* trees;  // [tokens, words]
  int words, heads;       // a token's queries, one per head, have consecutive numbers

  // The score to base 2.
  Floats score(Floats product) const {
    const Floats x = product * scale;
    if (soft_cap == 0) return x * LOG2_E;
    const Floats capped = x / soft_cap, size = capped < 0.0f ? -capped : capped;
    const Floats rest = exp2(size * (-2 * LOG2_E)), tanh = (1.0f - rest) / (1.0f + rest);
    return (capped < 0.0f ? -tanh : tanh) * (soft_cap * LOG2_E);
  }

  // The first key that any token in [token, end) sees, rounded down to where a tile may begin.
  int first(int token, int end) const {
    return *std::min_element(firsts + token, firsts + end) / COLUMNS * COLUMNS;
  }

  // Gives the keys that a query does not see the lowest score.
  void hide(int query, const Keys& keys, float* scores) const {
    const int token = query / heads, length = lengths[token], tree_start = tree_starts[token];
    for (int at = keys.first; at < std::min(keys.last, firsts[token]); ++at) scores[at - keys.first] = LOWEST;
    for (int at = std::max(keys.first, tree_start); at < std::min(keys.last, length); ++at) {
      const int node = at - tree_start;
      const bool is_seen = trees[int64_t(token) * words + node / 64] >> node % 64 & 1;
      scores[at - keys.first] = is_seen ? scores[at - keys.first] : LOWEST;
    }
    for (int at = std::max(keys.first, length); at < keys.last; ++at) scores[at - keys.first] = LOWEST;
  }
};

// Prefetches what will be read next while this is computed: of each block, parts [first, last) of `parts`.
template <class Matrix>
struct Ahead {
  Head<Matrix> head;
  Keys keys;
  int first = 0, last = 0, parts = 1;

  Ahead part(int from, int to, int of) const { return {head, keys, from, to, of}; }
  void fetch(int passed) const {
    const int at = keys.first + passed;
    if (at >= keys.last || at % head.block_size >= COLUMNS) return;
    head.prefetch(keys.blocks[at / head.block_size], head.size() * first / parts, head.size() * last / parts);
  }
};

// Attention of R queries to some keys. `scores` has room for [R, CHUNK].
template <int R, class Matrix, class Factor = typename Matrix::Factor>
static void attend(const Head<Matrix>& head, const Queries<Factor>& of, const Scoring& scoring, const Keys& keys,
                   const Ahead<Matrix>& ahead, float* scores) {
  const int D = head.head_size, B = head.block_size, count = keys.last - keys.first;
  const int padded = (count + LANES - 1) / LANES * LANES;
  const Factor* weights = reinterpret_cast<Factor*>(scores);  // overwrite the scores
  constexpr int WEIGHTS = CHUNK * sizeof(float) / sizeof(Factor);
  for (int t = 0; t < count; t += COLUMNS) {
    const int at = keys.first + t;
    ahead.fetch(t);
    Floats sum[R][2] = {};
    multiply<R, 2>(of.queries, D, head.keys(keys.blocks[at / B], at % B), D, sum);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) store(scores + r * CHUNK + t + v * LANES, scoring.score(sum[r][v]));
  }
  float rescaled[R];
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * CHUNK;
    std::fill(row + count, row + padded, LOWEST);  // beyond the last key
    scoring.hide(of.number + r, keys, row);
    Floats tops = load(row);
    for (int t = LANES; t < padded; t += LANES) tops = load(row + t) > tops ? load(row + t) : tops;
    const float top = std::max(of.top[r], reduced<false>(tops));
    Floats totals = {};
    for (int t = 0; t < padded; t += LANES) {
      const Floats of_keys = exp2(load(row + t) - top);
      totals += of_keys;
      Matrix::store(reinterpret_cast<Factor*>(row) + t, of_keys);
    }
    rescaled[r] = exp2(Floats{} + (of.top[r] - top))[0];
    of.total[r] = of.total[r] * rescaled[r] + reduced<true>(totals);
    of.top[r] = top;
  }
  const auto add_values = [&]<int V>(std::integral_constant<int, V>, int column) {
    Floats sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = load(of.sums + r * D + column + v * LANES) * rescaled[r];
    for (int t = 0, run; t < count; t += run) {
      const int at = keys.first + t;
      run = std::min(B - at % B, count - t);
      multiply<R, V>(weights + t, WEIGHTS, head.values(keys.blocks[at / B], at % B, column), run, sum);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(of.sums + r * D + column + v * LANES, sum[r][v]);
  };
  int column = 0;
  for (; column + COLUMNS <= D; column += COLUMNS) add_values(std::integral_constant<int, 2>{}, column);
  if (column < D) add_values(std::integral_constant<int, 1>{}, column);
}

// Attention of `count` queries to some keys, in the largest tiles that they fill. `next` is prefetched.
template <class Matrix, class Factor, int... SIZES>
static void attend_in_tiles(const Head<Matrix>& head, const Queries<Factor>& of, int count, const Scoring& scoring,
                            const Keys& keys, const Ahead<Matrix>& next, float* scores,
                            std::integer_sequence<int, SIZES...>) {
  int done = 0;
  const auto tiles_of = [&]<int R>(std::integral_constant<int, R>) {
    for (; done + R <= count; done += R) {
      attend<R>(head, of.from(done), scoring, keys, next.part(done, done + R, count), scores);
    }
  };
  (tiles_of(std::integral_constant<int, SIZES>{}), ...);
}

// The inputs and outputs of a step. A token is one of the batch that a group's row computes.
struct Batch {
  const void* queries;                  // [tokens of the batch, num_heads, head_size]
  void* outputs;                        // as `queries`
  int64_t query_stride, output_stride;  // from token to token, in numbers
  const void* cache;
  int64_t block_stride, head_stride;  // in numbers
  const int32_t* tables;              // [rows of the batch, blocks]
  int64_t table_stride;
  const int32_t *tokens, *rows, *lengths;  // by token of a group: its index in the batch, its row, the keys it sees
  const int32_t *firsts, *tree_starts;     // by token of a group, as in `Scoring`
  const uint64_t* trees;
  const int32_t *starts, *num_shared;  // by group: its first token, and the end; keys that all of its rows share
  int32_t num_groups, num_words, block_size, head_size, num_heads, num_kv_heads, num_threads;
  float scale, soft_cap;
  const float* sinks;  // [num_heads], scores without values; null if there are none
};

template <class Matrix>
static void attend_to_batch(const Batch& b) {
  using Number = typename Matrix::Number;
  using Stored = typename Number::Stored;
  using Factor = typename Matrix::Factor;
  const int D = b.head_size, heads = b.num_heads / b.num_kv_heads;
  constexpr std::integer_sequence<int, TILES> tiles;
  struct Work {
    int group, kv_head, first, last;  // tokens
  };
  const auto head_of = [&](const Work& work) {
    const Stored* cache = static_cast<const Stored*>(b.cache) + work.kv_head * b.head_stride;
    return Head<Matrix>{cache, b.block_stride, b.block_size, D};
  };
  const Scoring scoring = {b.scale, b.soft_cap, b.firsts, b.lengths, b.tree_starts, b.trees, b.num_words, heads};
  const auto blocks_of = [&](int token) { return b.tables + b.rows[token] * b.table_stride; };
  std::vector<Work> works;
  int most_queries = 0;
  for (int group = 0; group < b.num_groups; ++group) {
    const int first = b.starts[group], count = b.starts[group + 1] - first, pieces = b.num_groups * b.num_kv_heads;
    int parts = (count * heads + MOST_QUERIES - 1) / MOST_QUERIES;
    if (b.num_threads > 1) parts = std::max(parts, (2 * b.num_threads + pieces - 1) / pieces);
    const int step = std::max((count + parts - 1) / parts, 1);
    most_queries = std::max(most_queries, step * heads);
    for (int kv_head = 0; kv_head < b.num_kv_heads; ++kv_head)
      for (int t = first; t < first + count; t += step)
        works.push_back({group, kv_head, t, std::min(t + step, first + count)});
  }
#pragma omp parallel num_threads(b.num_threads)
  {
    static thread_local std::vector<float> memory;  // kept, because allocating it costs more than filling it
    memory.resize(std::max(memory.size(), size_t(most_queries) * (2 * D + 2) + MOST_TILE * CHUNK + LINE));
    float* scores = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + LINE - 1) / LINE * LINE);
    Queries<Factor> all = {reinterpret_cast<Factor*>(scores + MOST_TILE * CHUNK), nullptr, nullptr, nullptr, D, 0};
    all.sums = scores + MOST_TILE * CHUNK + most_queries * D;
    all.top = all.sums + most_queries * D;
    all.total = all.top + most_queries;
#pragma omp for schedule(dynamic) nowait
    for (int index = 0; index < int(works.size()); ++index) {
      const Work& work = works[index];
      const int count = (work.last - work.first) * heads, shared = b.num_shared[work.group];
      const Head<Matrix> head = head_of(work);
      all.number = work.first * heads;
      for (int j = 0; j < count; ++j) {
        const int64_t token = b.tokens[work.first + j / heads];
        const Stored* query = static_cast<const Stored*>(b.queries) + token * b.query_stride;
        query += (work.kv_head * heads + j % heads) * D;
        for (int d = 0; d < D; ++d) all.queries[j * D + d] = Matrix::factor(query[d]);
      }
      std::fill(all.sums, all.sums + count * D, 0.0f);
      for (int j = 0; j < count; ++j) {
        all.top[j] = b.sinks == nullptr ? LOWEST : b.sinks[work.kv_head * heads + j % heads] * LOG2_E;
        all.total[j] = b.sinks == nullptr ? 0.0f : 1.0f;
      }

      // The work that this thread takes next, if all pieces take equally long.
      const Work& after = works[std::min<int>(index + b.num_threads, works.size() - 1)];
      const int first = scoring.first(after.first, after.last), end_of_next = b.num_shared[after.group];
      const Keys first_keys = {blocks_of(after.first), first, std::min(first + CHUNK, end_of_next)};
      const Ahead<Matrix> first_of_next = {head_of(after), first_keys};
      const int32_t* blocks = blocks_of(work.first);
      for (int t = scoring.first(work.first, work.last); t < shared; t += CHUNK) {
        const Keys keys = {blocks, t, std::min(t + CHUNK, shared)};
        const Ahead<Matrix> next = {head, {blocks, keys.last, std::min(keys.last + CHUNK, shared)}};
        attend_in_tiles(head, all, count, scoring, keys, keys.last < shared ? next : first_of_next, scores, tiles);
      }
      for (int token = work.first, next; token < work.last; token = next) {  // tokens of one row at a time
        next = token + 1;
        while (next < work.last && b.rows[next] == b.rows[token]) ++next;
        const Queries<Factor> own = all.from((token - work.first) * heads);
        if (next < work.last && b.lengths[next] > shared) {
          const int begin = std::max(shared, b.firsts[next]), held = std::min(b.block_size, b.lengths[next] - begin);
          head.prefetch(blocks_of(next)[begin / b.block_size], 0, int64_t(b.block_size + held) * D);
        }
        const int end = *std::max_element(b.lengths + token, b.lengths + next);
        for (int t = std::max(shared, scoring.first(token, next)); t < end; t += CHUNK) {
          const Keys keys = {blocks_of(token), t, std::min(t + CHUNK, end)};
          attend_in_tiles(head, own, (next - token) * heads, scoring, keys, {head, {}}, scores, tiles);
        }
      }
      for (int j = 0; j < count; ++j) {
        const int64_t token = b.tokens[work.first + j / heads];
        Stored* output = static_cast<Stored*>(b.outputs) + token * b.output_stride;
        output += (work.kv_head * heads + j % heads) * D;
        const float share = 1 / all.total[j];
        for (int d = 0; d < D; ++d) output[d] = Number::narrowed(all.sums[j * D + d] * share);
      }
    }
  }
}

extern "C" void attend_to_shared_prefixes(const Batch* batch) { attend_to_batch<MATRIX>(*batch); }
