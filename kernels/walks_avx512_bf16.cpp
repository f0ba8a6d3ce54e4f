// Products of matrices with AVX512-BF16, which multiplies pairs of bf16 values.
#include <immintrin.h>

#include "kernels/multiply_walk.h"
#include "kernels/simd/avx512.h"
#include "kernels/walks.h"

namespace ballast::kernels {
namespace {

struct Avx512Bf16 : simd::Avx512 {
};  // a name of its own, so that no processor without these instructions shares a function

// A pair has two elements of the inner dimension that follow each other, of one row of the left factor or one column of the
// right one.
struct PairedFactors {
  using Subnormals = simd::SubnormalsAreZero;
  using Value = std::uint32_t;
  using Tile = ProductTile<simd::Avx512>;

  static constexpr std::size_t values(std::size_t depth) { return (depth + 1) / 2; }

  static void pack_left(const Factor& from, std::size_t rows, std::size_t depth, Value* to) {
    pack<Tile::rows>(transposed(from), rows, depth, to);
  }

  static void pack_right(const Factor& from, std::size_t columns, std::size_t depth, Value* to) {
    pack<Tile::columns>(from, columns, depth, to);
  }

  // Continues the sums of one tile.
  static void multiply_tile(const Value* left, const Value* right, std::size_t pairs, float* sums) {
    __m512 now[Tile::rows][Tile::vectors];
    for (std::size_t row = 0; row < Tile::rows; ++row) {
      for (std::size_t i = 0; i < Tile::vectors; ++i) {
        now[row][i] = _mm512_loadu_ps(sums + row * block_size + i * lanes);
      }
    }
    for (std::size_t pair = 0; pair < pairs; ++pair, left += Tile::rows, right += Tile::columns) {
      __m512bh of_right[Tile::vectors];
      for (std::size_t i = 0; i < Tile::vectors; ++i) {
        of_right[i] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + i * lanes));
      }
      for (std::size_t row = 0; row < Tile::rows; ++row) {
        const auto of_left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(left[row])));
        for (std::size_t i = 0; i < Tile::vectors; ++i) {
          now[row][i] = _mm512_dpbf16_ps(now[row][i], of_left, of_right[i]);
        }
      }
    }
    for (std::size_t row = 0; row < Tile::rows; ++row) {
      for (std::size_t i = 0; i < Tile::vectors; ++i) {
        _mm512_storeu_ps(sums + row * block_size + i * lanes, now[row][i]);
      }
    }
  }

 private:
  static constexpr std::size_t lanes = simd::Avx512::width;

  // Packs `count` columns in strips of `width`, each pair by pair. Columns of the last strip that are not there are zeros.
  template <std::size_t width>
  static void pack(const Factor& from, std::size_t count, std::size_t depth, Value* to) {
    for (std::size_t first = 0; first < count; first += width, to += width * values(block_depth)) {
      for (std::size_t begin = 0; begin < width; begin += lanes) {
        const std::size_t in_vector = width - begin < lanes ? width - begin : lanes;
        const std::size_t left = count - first > begin ? count - first - begin : 0;
        const Columns columns{.from = part(from, 0, first + begin),
                              .there = mask_of(left < in_vector ? left : in_vector),
                              .stored = mask_of(in_vector),
                              .to_step = width};
        from.column_step == 1 ? interleave(columns, depth, to + begin) : collect(columns, depth, to + begin);
      }
    }
  }

  // The columns of a vector.
  struct Columns {
    Factor from;
    __mmask16 there;
    __mmask16 stored;
    std::size_t to_step;
  };

  static __mmask16 mask_of(std::size_t count) { return static_cast<__mmask16>((1u << count) - 1); }

  // Packs a factor by rows: each vector has elements of two rows.
  static void interleave(const Columns& columns, std::size_t depth, Value* to) {
    const auto load = [&](std::size_t k) {
      return _mm512_cvtepu16_epi32(
          _mm256_maskz_loadu_epi16(columns.there, columns.from.data + k * columns.from.row_step));
    };
    for (std::size_t k = 0; k < depth; k += 2, to += columns.to_step) {
      const __m512i second = k + 1 < depth ? _mm512_slli_epi32(load(k + 1), 16) : _mm512_setzero_si512();
      _mm512_mask_storeu_epi32(to, columns.stored, _mm512_or_si512(load(k), second));
    }
  }

  // Packs a factor by columns: pairs are next to each other in memory.
  static void collect(const Columns& columns, std::size_t depth, Value* to) {
    const long long step = static_cast<long long>(columns.from.column_step) * 2;  // bytes of a bf16 value
    const __m512i zero_to_seven = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i places = _mm512_mullo_epi64(zero_to_seven, _mm512_set1_epi64(step));
    const auto words = [&](std::size_t k, std::size_t column, __mmask8 there) {
      const std::uint16_t* const at = columns.from.data + k + column * columns.from.column_step;
      return _mm512_mask_i64gather_epi32(_mm256_setzero_si256(), there, places, at, 1);
    };
    const auto low = static_cast<__mmask8>(columns.there), high = static_cast<__mmask8>(columns.there >> 8);
    for (std::size_t k = 0; k + 1 < depth; k += 2, to += columns.to_step) {
      const __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(words(k, 0, low)), words(k, lanes / 2, high), 1);
      _mm512_mask_storeu_epi32(to, columns.stored, pairs);
    }
    if (depth % 2 == 0) return;
    for (std::size_t i = 0; columns.stored >> i != 0; ++i) {
      const bool is_there = (columns.there >> i & 1) != 0;
      to[i] = is_there ? columns.from.data[depth - 1 + i * columns.from.column_step] : 0;
    }
  }
};

}  // namespace

extern const MultiplyBlock multiply_block_avx512_bf16;
const MultiplyBlock multiply_block_avx512_bf16 = &multiply_block<Avx512Bf16, PairedFactors>;

}  // namespace ballast::kernels
