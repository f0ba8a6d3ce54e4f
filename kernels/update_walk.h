// The CPU walk of the optimizer step, for any width of lanes S. It works group by group: it reads the gradient into a
// small array, then decodes, updates and encodes the state in registers, so memory is read and written once. An object for each
// state format reads a group of elements as fp32 lanes, and writes them back:
//
//   format           master           moments
//   fp32             Fp32Master       Fp32Moments
//   split            SplitMaster      Fp32Moments
//   bf16             SplitMaster      Bf16Moments
//   compact, 4bit    CompactMaster    CodedMoments
//
// A rule that makes a direction has a Direction in place of the master.
//
// Each object serves the group that begins at element `first` of the tile. If both master and moments round, they use
// different bits of an element's random bits.
#pragma once

#include <cstring>

#include "kernels/number_walk.h"
#include "kernels/random_math.h"
#include "kernels/state_math.h"
#include "kernels/update.h"

namespace ballast::kernels {

// Returns the address of element `first` of an array, or null if the tile has no such array.
template <class T>
T* at(std::byte* array, std::size_t first) {
  return array == nullptr ? nullptr : reinterpret_cast<T*>(array) + first;
}

// The values that one pass over a group hands to the next, in the innermost cache.
struct Scratch {
  alignas(64) float gradient[group_size];
  alignas(64) std::uint32_t random[group_size];
  alignas(64) float momentum[group_size];
  alignas(64) float root[group_size];
};

// --- Masters ---

template <class S>
class Fp32Master {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;

  Fp32Master(const TileMemory& tile, std::size_t first, const Scratch&)
      : master_(at<float>(tile.parameter_dtype == DType::fp32 ? tile.parameter : tile.master, first)),
        parameter_(at<std::uint16_t>(tile.parameter, first)),
        dtype_(tile.parameter_dtype),
        aligned_(reinterpret_cast<std::uintptr_t>(parameter_) % (2 * S::width) == 0) {}

  F read(std::size_t i) const { return S::load(master_ + i); }

  void write(std::size_t i, F master) {
    S::store(master_ + i, master);
    if (dtype_ == DType::bf16) {
      write_parameter(i, to_bf16_parameter(master));
    } else if (dtype_ == DType::fp16) {
      write_parameter(i, to_fp16(master));
    }
  }

 private:
  // The parameter is written but never read here, so its stores bypass the caches. That saves reading its lines first.
  void write_parameter(std::size_t i, typename S::U half) {
    if (aligned_) {
      S::stream(parameter_ + i, half);
    } else {
      S::store(parameter_ + i, half);
    }
  }

  float* master_;
  std::uint16_t* parameter_;
  DType dtype_;
  bool aligned_;
};

template <class S>
class SplitMaster {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;

  SplitMaster(const TileMemory& tile, std::size_t first, const Scratch&)
      : parameter_(at<std::uint16_t>(tile.parameter, first)), remainder_(at<std::uint16_t>(tile.master, first)) {}

  F read(std::size_t i) const { return join16(S::load_halves(parameter_ + i, remainder_ + i)); }

  void write(std::size_t i, F master) { S::store_halves(parameter_ + i, remainder_ + i, split16(master)); }

 private:
  std::uint16_t* parameter_;
  std::uint16_t* remainder_;
};

template <class S>
class CompactMaster {
  using F = typename S::F;

 public:
  static constexpr bool rounds = true;

  CompactMaster(const TileMemory& tile, std::size_t first, const Scratch& scratch)
      : parameter_(at<std::uint16_t>(tile.parameter, first)),
        remainder_(at<std::uint8_t>(tile.master, first)),
        random_(scratch.random) {}

  F read(std::size_t i) const { return join8(S::load_high(parameter_ + i), S::load_signed(remainder_ + i)); }

  void write(std::size_t i, F master) {
    const auto parts = split8(master, S::load(random_ + i));
    S::store_high(parameter_ + i, parts.parameter);
    S::store(remainder_ + i, parts.remainder);
  }

 private:
  std::uint16_t* parameter_;
  std::uint8_t* remainder_;
  const std::uint32_t* random_;
};

// A direction in place of a parameter. Nothing is read.
template <class S>
class Direction {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;

  Direction(const TileMemory& tile, std::size_t first, const Scratch&)
      : direction_(at<std::uint16_t>(tile.parameter, first)) {}

  F read(std::size_t) const { return F(0.0f); }

  void write(std::size_t i, F direction) { S::store(direction_ + i, to_bf16(direction)); }

 private:
  std::uint16_t* direction_;
};

// --- Moments ---

template <class S>
class Fp32Moments {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;

  Fp32Moments(const TileMemory& tile, std::size_t first, const Scratch&)
      : momenta_(at<float>(tile.momentum, first)), variances_(at<float>(tile.variance, first)) {}

  F momentum(std::size_t i) const { return S::load(momenta_ + i); }
  SecondMoment<F> variance(std::size_t i) const { return {S::load(variances_ + i), F{}}; }
  void write_momentum(std::size_t i, F m) { S::store(momenta_ + i, flush(m)); }
  void write_variance(std::size_t i, const SecondMoment<F>& v) { S::store(variances_ + i, v.value); }
  template <class Rule>
  void find_scales() {}
  template <class Rule>
  void encode() {}

 private:
  float* momenta_;
  float* variances_;
};

template <class S>
class Bf16Moments {
  using F = typename S::F;
  using U = typename S::U;

 public:
  static constexpr bool rounds = true;

  Bf16Moments(const TileMemory& tile, std::size_t first, const Scratch& scratch)
      : momenta_(at<std::uint16_t>(tile.momentum, first)),
        variances_(at<std::uint16_t>(tile.variance, first)),
        random_(scratch.random) {}

  F momentum(std::size_t i) const { return as_float(S::load_high(momenta_ + i)); }
  SecondMoment<F> variance(std::size_t i) const { return {as_float(S::load_high(variances_ + i)), F{}}; }
  void write_momentum(std::size_t i, F m) {
    S::store_high(momenta_ + i, add_noise(flush(m), S::load(random_ + i) & U(0xffffu)));
  }
  void write_variance(std::size_t i, const SecondMoment<F>& v) {
    S::store_high(variances_ + i, add_noise(v.value, shift_right<16>(S::load(random_ + i))));
  }
  template <class Rule>
  void find_scales() {}
  template <class Rule>
  void encode() {}

 private:
  std::uint16_t* momenta_;
  std::uint16_t* variances_;
  const std::uint32_t* random_;
};

// The scale of a group is known only when all its new moments are known. Until then they stay as fp32 in the scratch.
template <class S, StateFormat format>
class CodedMoments {
  using F = typename S::F;
  using U = typename S::U;
  using Momentum = typename MomentCodes<format>::Momentum;
  using Root = typename MomentCodes<format>::Root;

 public:
  static constexpr bool rounds = true;

  CodedMoments(const TileMemory& tile, std::size_t first, Scratch& scratch)
      : momenta_(at<std::uint8_t>(tile.momentum, moment_bytes(format, first))),
        roots_(at<std::uint8_t>(tile.variance, moment_bytes(format, first))),
        scratch_(scratch) {
    if (tile.momentum != nullptr) {
      momentum_scale_ = tile.momentum_scales + first / group_size;
      old_momentum_scale_ = F(*momentum_scale_);
    }
    if (tile.variance != nullptr) {
      root_scale_ = tile.variance_scales + first / group_size;
      old_root_scale_ = F(*root_scale_);
    }
  }

  F momentum(std::size_t i) const { return Momentum::decode(momenta_.load(i), old_momentum_scale_); }
  SecondMoment<F> variance(std::size_t i) const {
    const F root = Root::decode(roots_.load(i), old_root_scale_);
    return {root * root, root};
  }
  void write_momentum(std::size_t i, F m) {
    S::store(scratch_.momentum + i, m);
    largest_momentum_ = max(largest_momentum_, bits(magnitude(m)));
  }
  void write_variance(std::size_t i, const SecondMoment<F>& v) {
    S::store(scratch_.root + i, v.root);
    largest_root_ = max(largest_root_, bits(v.root));
  }

  template <class Rule>
  void find_scales() {
    if constexpr (Rule::has_momentum) momentum_factor_ = new_scale<Momentum>(largest_momentum_, *momentum_scale_);
    if constexpr (Rule::has_variance) root_factor_ = new_scale<Root>(largest_root_, *root_scale_);
  }
  template <class Rule>
  void encode() {
    for (std::size_t i = 0; i < group_size; i += S::width) {
      const U random = S::load(scratch_.random + i);
      if constexpr (Rule::has_momentum) {
        momenta_.store(i, Momentum::encode(S::load(scratch_.momentum + i), momentum_factor_, random));
      }
      if constexpr (Rule::has_variance) {
        roots_.store(i, Root::encode(S::load(scratch_.root + i), root_factor_, random));
      }
    }
  }

 private:
  template <class Code>
  static F new_scale(U largest_lanes, float& scale) {
    const float largest = as_float(S::max_of_lanes(largest_lanes));
    scale = Code::scale(largest);
    return F(Code::factor(largest));
  }

  CodeArray<S, Momentum::bits_of_code> momenta_;
  CodeArray<S, Root::bits_of_code> roots_;
  float* momentum_scale_ = nullptr;
  float* root_scale_ = nullptr;
  Scratch& scratch_;
  F old_momentum_scale_{};
  F old_root_scale_{};
  F momentum_factor_{};
  F root_factor_{};
  U largest_momentum_{0u};
  U largest_root_{0u};
};

// --- The step ---

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
  alignas(64) std::byte copies[5][4 * group_size]{};  // of each array
  TileMemory used = tail;
  if constexpr (!Rule::has_momentum) used.momentum = nullptr;
  if constexpr (!Rule::has_variance) used.variance = nullptr;
  TileMemory group = used;
  group.count = group_size;
  // The unused half of a last byte is no element of the group: it is read and written as zero.
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t bits) {
    const std::size_t bytes = (tail.count * bits + 7) / 8;
    std::memcpy(to, from, bytes);
    if (tail.count * bits % 8 != 0) to[bytes - 1] &= std::byte{0xf};
  };
  std::size_t next = 0;
  each_array(group, [&](auto*& array, std::size_t bits) {
    std::byte* const here = copies[next++];
    if (array == nullptr) return;
    copy(here, array, bits);
    array = here;
  });
  update_groups<S>(group, rule, gradient_factor);
  next = 0;
  each_array(used, [&](auto*& array, std::size_t bits) {
    const std::byte* const here = copies[next++];
    if constexpr (std::is_same_v<decltype(array), std::byte*&>) {  // not the gradient
      if (array != nullptr) copy(array, here, bits);
    }
  });
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
