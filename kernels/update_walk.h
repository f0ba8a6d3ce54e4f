// The CPU walk of the optimizer step, for any width of lanes S. It goes by groups of elements: the gradient is read into a
// small array first, then state is decoded, updated and encoded in registers, so memory is read and written once.
#pragma once

#include <cstring>

#include "kernels/random_math.h"
#include "kernels/state_walk.h"

namespace ballast::kernels {

template <class S>
void read_gradient(const UpdateTile& group, float factor, float* to) {
  using F = typename S::F;
  const auto* wide = as<float>(group.gradient);
  const auto* half = as<std::uint16_t>(group.gradient);
  const auto read = [=](auto lanes_at) {
    for (std::size_t i = 0; i < group_size; i += S::width) {
      S::store(to + i, flush(lanes_at(i) * F(factor)));
    }
  };
  switch (group.gradient_dtype) {
    case DType::fp32: return read([=](std::size_t i) { return S::load(wide + i); });
    case DType::bf16: return read([=](std::size_t i) { return from_bf16(S::load(half + i)); });
    default: return read([=](std::size_t i) { return from_fp16(S::load(half + i)); });
  }
}

template <class S>
void draw_random_bits(const UpdateTile& group, std::uint32_t* to) {
  using U = typename S::U;
  const RoundingKey key = rounding_key(group.rounding_stream, group.first_index);
  const U first = S::lane_numbers() + U(static_cast<std::uint32_t>(group.first_index));
  for (std::size_t i = 0; i < group_size; i += S::width) {
    S::store(to + i, random_bits(first + U(static_cast<std::uint32_t>(i)), key));
  }
}

// The rule comes by value: its coefficients then stay in registers while the stores pass by.
template <class S, class Master, class Moments, class Rule>
void update_group(const UpdateTile& group, const Rule rule, float gradient_factor) {
  using F = typename S::F;
  alignas(64) float gradient[group_size];
  alignas(64) std::uint32_t random[group_size];
  read_gradient<S>(group, gradient_factor, gradient);
  if constexpr (Master::rounds || Moments::rounds) draw_random_bits<S>(group, random);

  Master master(group, random);
  Moments moments(group, random);
  for (std::size_t i = 0; i < group_size; i += S::width) {
    F p = master.read(i);
    F m{};
    SecondMoment<F> v{};
    if constexpr (Rule::has_momentum) m = moments.momentum(i);
    if constexpr (Rule::has_variance) v = moments.variance(i);
    rule(p, m, v, S::load(gradient + i));
    master.write(i, p);
    if constexpr (Rule::has_momentum) moments.write_momentum(i, m);
    if constexpr (Rule::has_variance) moments.write_variance(i, v);
  }
  if constexpr (Rule::has_momentum) moments.finish_momentum();
  if constexpr (Rule::has_variance) moments.finish_variance();
}

template <class S, class Rule>
void update_groups(const UpdateTile& tile, const Rule& rule, float gradient_factor) {
  const auto each_group = [&]<class Master, class Moments>() {
    for (std::size_t first = 0; first < tile.count; first += group_size) {
      update_group<S, Master, Moments>(part(tile, first, group_size), rule, gradient_factor);
    }
  };
  switch (tile.format) {
    case StateFormat::fp32: return each_group.template operator()<Fp32Master<S>, Fp32Moments<S>>();
    case StateFormat::split: return each_group.template operator()<SplitMaster<S>, Fp32Moments<S>>();
    case StateFormat::bf16: return each_group.template operator()<SplitMaster<S>, Bf16Moments<S>>();
    case StateFormat::compact: return each_group.template operator()<CompactMaster<S>, CompactMoments<S>>();
  }
}

// The last, incomplete group of a run: worked on as a whole group in a copy, of which the true part is copied back.
template <class S, class Rule>
void update_tail(const UpdateTile& tail, const Rule& rule, float gradient_factor) {
  constexpr std::size_t parts = 5;
  alignas(64) std::byte copies[parts][4 * group_size]{};
  UpdateTile group = tail;
  group.count = group_size;
  const auto lend = [&](auto*& pointer, std::byte* copy, std::size_t element_bytes) {
    if (pointer != nullptr) {
      std::memcpy(copy, pointer, tail.count * element_bytes);
      pointer = copy;
    }
  };
  const auto give_back = [&](std::byte* pointer, const std::byte* copy, std::size_t element_bytes) {
    if (pointer != nullptr) {
      std::memcpy(pointer, copy, tail.count * element_bytes);
    }
  };
  lend(group.gradient, copies[0], byte_size(tail.gradient_dtype));
  lend(group.parameter, copies[1], byte_size(tail.parameter_dtype));
  lend(group.master, copies[2], master_bytes(tail.format));
  lend(group.momentum, copies[3], moment_bytes(tail.format));
  lend(group.variance, copies[4], moment_bytes(tail.format));
  update_groups<S>(group, rule, gradient_factor);
  give_back(tail.parameter, copies[1], byte_size(tail.parameter_dtype));
  give_back(tail.master, copies[2], master_bytes(tail.format));
  give_back(tail.momentum, copies[3], moment_bytes(tail.format));
  give_back(tail.variance, copies[4], moment_bytes(tail.format));
}

// One run, on the calling thread.
template <class S>
void update_run(const UpdateTile& tile, const GroupStep& step) {
  const std::size_t whole = tile.count / group_size * group_size;
  std::visit(
      [&](const auto& rule) {
        update_groups<S>(part(tile, 0, whole), rule, step.gradient_factor);
        if (whole < tile.count) {
          update_tail<S>(part(tile, whole, tile.count - whole), rule, step.gradient_factor);
        }
      },
      step.rule);
}

}  // namespace ballast::kernels
