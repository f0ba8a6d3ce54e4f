// The CPU walk of the optimizer step, for any width of lanes S. It works group by group: it reads the gradient into a
// small array, then decodes, updates and encodes the state in registers, so memory is read and written once.
#pragma once

#include <cstring>

#include "kernels/random_math.h"
#include "kernels/state_walk.h"

namespace ballast::kernels {

// This is inlined because a call would move all coefficients from registers to memory and back.
template <class S>
[[gnu::always_inline]] inline void read_gradient(const TileMemory& tile, std::size_t first, float factor, float* to) {
  const auto read = [=](auto lanes_at) {
    for (std::size_t i = 0; i < group_size; i += S::width) {
      S::store(to + i, lanes_at(i) * typename S::F(factor));
    }
  };
  const auto* wide = reinterpret_cast<const float*>(tile.gradient) + first;
  const auto* half = reinterpret_cast<const std::uint16_t*>(tile.gradient) + first;
  switch (tile.gradient_dtype) {
    case DType::fp32: return read([=](std::size_t i) { return S::load(wide + i); });
    case DType::bf16: return read([=](std::size_t i) { return as_float(S::load_high(half + i)); });
    default: return read([=](std::size_t i) { return from_fp16(S::load(half + i)); });
  }
}

template <class S>
void draw_random_bits(const TileMemory& tile, std::size_t first, std::uint32_t* to) {
  using U = typename S::U;
  const std::uint64_t index = tile.first_index + first;
  RoundingKey key = rounding_key(tile.rounding_stream, index);
  key.first ^= static_cast<std::uint32_t>(index);  // a group begins at a multiple of its size, so XOR adds the index
  for (std::size_t i = 0; i < group_size; i += S::width) {
    S::store(to + i, random_bits(S::lane_numbers() + U(static_cast<std::uint32_t>(i)), key));
  }
}

// The rule is passed by value so that its coefficients stay in registers across the stores.
template <class S, class Master, class Moments, class Rule>
void update_each_group(const TileMemory& tile, const Rule rule, float gradient_factor) {
  using F = typename S::F;
  Scratch scratches[2];
  const auto scratch_of = [&](std::size_t first) -> Scratch& { return scratches[first / group_size % 2]; };
  const auto prepare = [&](std::size_t first) {
    if (first >= tile.count) return;
    read_gradient<S>(tile, first, gradient_factor, scratch_of(first).gradient);
    if constexpr (Master::rounds || Moments::rounds) draw_random_bits<S>(tile, first, scratch_of(first).random);
  };
  prepare(0);
  for (std::size_t first = 0; first < tile.count; first += group_size) {
    Scratch& scratch = scratch_of(first);
    Master master(tile, first, scratch);
    Moments moments(tile, first, scratch);
    for (std::size_t i = 0; i < group_size; i += S::width) {
      F p = master.read(i);
      F m{};
      SecondMoment<F> v{};
      if constexpr (Rule::has_momentum) m = moments.momentum(i);
      if constexpr (Rule::has_variance) v = moments.variance(i);
      rule(p, m, v, S::load(scratch.gradient + i));
      master.write(i, p);
      if constexpr (Rule::has_momentum) moments.write_momentum(i, m);
      if constexpr (Rule::has_variance) moments.write_variance(i, v);
    }
    moments.template find_scales<Rule>();
    prepare(first + group_size);  // overlaps the long chain of operations that computes the scales
    moments.template encode<Rule>();
  }
}

template <class S, class Rule>
void update_groups(const TileMemory& tile, const Rule& rule, float gradient_factor) {
  const auto with = [&]<class Master, class Moments>() {
    using Written = std::conditional_t<MakesDirection<Rule>, Direction<S>, Master>;
    update_each_group<S, Written, Moments>(tile, rule, gradient_factor);
  };
  using enum StateFormat;
  switch (tile.format) {
    case fp32: return with.template operator()<Fp32Master<S>, Fp32Moments<S>>();
    case split: return with.template operator()<SplitMaster<S>, Fp32Moments<S>>();
    case bf16: return with.template operator()<SplitMaster<S>, Bf16Moments<S>>();
    case compact: return with.template operator()<CompactMaster<S>, CodedMoments<S, compact>>();
    case four_bit: return with.template operator()<CompactMaster<S>, CodedMoments<S, four_bit>>();
  }
}

// Updates the last, incomplete group of a run. It works on a copy padded to a whole group, and copies only the real
// elements back.
template <class S, class Rule>
void update_tail(const TileMemory& tail, const Rule& rule, float gradient_factor) {
  constexpr std::size_t parts = 5;
  alignas(64) std::byte copies[parts][4 * group_size]{};
  TileMemory group = tail;
  group.count = group_size;
  const auto copy_in = [&](auto*& pointer, std::byte* copy, std::size_t bytes) {
    if (pointer != nullptr) {
      std::memcpy(copy, pointer, bytes);
      pointer = copy;
    }
  };
  const auto copy_back = [&](std::byte* pointer, const std::byte* copy, std::size_t bytes) {
    if (pointer != nullptr) {
      std::memcpy(pointer, copy, bytes);
    }
  };
  const std::size_t moment = moment_bytes(tail.format, tail.count);
  // The unused half of a last byte is no element of the group: it is read and written as zero.
  const auto clear_unused_half = [&](std::byte* copy) {
    if (moment_bits(tail.format) == 4 && tail.count % 2 == 1) {
      copy[moment - 1] &= std::byte{0xf};
    }
  };
  const auto copy_moment_in = [&](auto*& pointer, std::byte* copy) {
    copy_in(pointer, copy, moment);
    clear_unused_half(copy);
  };
  const auto copy_moment_back = [&](std::byte* pointer, std::byte* copy) {
    clear_unused_half(copy);
    copy_back(pointer, copy, moment);
  };
  copy_in(group.gradient, copies[0], tail.count * byte_size(tail.gradient_dtype));
  copy_in(group.parameter, copies[1], tail.count * byte_size(tail.parameter_dtype));
  copy_in(group.master, copies[2], tail.count * master_bytes(tail.format));
  if constexpr (Rule::has_momentum) copy_moment_in(group.momentum, copies[3]);
  if constexpr (Rule::has_variance) copy_moment_in(group.variance, copies[4]);
  update_groups<S>(group, rule, gradient_factor);
  copy_back(tail.parameter, copies[1], tail.count * byte_size(tail.parameter_dtype));
  copy_back(tail.master, copies[2], tail.count * master_bytes(tail.format));
  if constexpr (Rule::has_momentum) copy_moment_back(tail.momentum, copies[3]);
  if constexpr (Rule::has_variance) copy_moment_back(tail.variance, copies[4]);
}

// Updates one run on the calling thread.
template <class S>
void update_run(const TileMemory& tile, const GroupStep& step) {
  const std::size_t whole = tile.count / group_size * group_size;
  std::visit(
      [&](const auto& rule) {
        update_groups<S>(part(tile, 0, whole), rule, step.gradient_factor);
        if (whole < tile.count) {
          update_tail<S>(part(tile, whole, tile.count - whole), rule, step.gradient_factor);
        }
      },
      step.rule);
  S::finish_streams();
}

}  // namespace ballast::kernels
