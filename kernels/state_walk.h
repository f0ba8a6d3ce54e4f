// The CPU walk of the state formats: a group of elements is read as fp32 lanes and written back from them.
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

#include "kernels/code_array.h"
#include "kernels/moment_code_math.h"
#include "kernels/number_math.h"
#include "kernels/rules/second_moment.h"
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
    S::store_high(momenta_ + i, to_bf16_stochastic(flush(m), S::load(random_ + i) & U(0xffffu)));
  }
  void write_variance(std::size_t i, const SecondMoment<F>& v) {
    S::store_high(variances_ + i, to_bf16_stochastic(v.value, shift_right<16>(S::load(random_ + i))));
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

}  // namespace ballast::kernels
