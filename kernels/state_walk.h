// The CPU walk of the state formats: a group of elements is read as fp32 lanes and written back from them.
//
//   format    master           moments             A group's pointers all go to its first element. `random` holds 32 bits
//   fp32      Fp32Master       Fp32Moments         for each of its elements; the masters and moments that round use other
//   split     SplitMaster      Fp32Moments         bits of them.
//   bf16      SplitMaster      Bf16Moments
//   compact   CompactMaster    CompactMoments
#pragma once

#include "kernels/fp16_math.h"
#include "kernels/rules/second_moment.h"
#include "kernels/state_math.h"
#include "kernels/update.h"

namespace ballast::kernels {

template <class T>
T* as(std::byte* bytes) {
  return reinterpret_cast<T*>(bytes);
}
template <class T>
const T* as(const std::byte* bytes) {
  return reinterpret_cast<const T*>(bytes);
}

// --- Masters ---

template <class S>
class Fp32Master {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;

  Fp32Master(const UpdateTile& group, const std::uint32_t*)
      : master_(as<float>(group.parameter_dtype == DType::fp32 ? group.parameter : group.master)),
        parameter_(as<std::uint16_t>(group.parameter)),
        dtype_(group.parameter_dtype),
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
  // The parameter is only written here: past the caches, which saves reading its lines first.
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

  SplitMaster(const UpdateTile& group, const std::uint32_t*)
      : parameter_(as<std::uint16_t>(group.parameter)), remainder_(as<std::uint16_t>(group.master)) {}

  F read(std::size_t i) const { return join16(S::load(parameter_ + i), S::load_signed(remainder_ + i)); }

  void write(std::size_t i, F master) {
    S::store(parameter_ + i, to_bf16_parameter(master));
    S::store(remainder_ + i, remainder16(master));
  }

 private:
  std::uint16_t* parameter_;
  std::uint16_t* remainder_;
};

template <class S>
class CompactMaster {
  using F = typename S::F;

 public:
  static constexpr bool rounds = true;

  CompactMaster(const UpdateTile& group, const std::uint32_t* random)
      : parameter_(as<std::uint16_t>(group.parameter)), remainder_(as<std::uint8_t>(group.master)), random_(random) {}

  F read(std::size_t i) const { return join8(S::load(parameter_ + i), S::load_signed(remainder_ + i)); }

  void write(std::size_t i, F master) {
    const F kept = round_to_24_bits(master, S::load(random_ + i));
    S::store(parameter_ + i, to_bf16_parameter(kept));
    S::store(remainder_ + i, remainder8(kept));
  }

 private:
  std::uint16_t* parameter_;
  std::uint8_t* remainder_;
  const std::uint32_t* random_;
};

// --- Moments ---

template <class S>
class Fp32Moments {
  using F = typename S::F;

 public:
  static constexpr bool rounds = false;

  Fp32Moments(const UpdateTile& group, const std::uint32_t*)
      : momenta_(as<float>(group.momentum)), variances_(as<float>(group.variance)) {}

  F momentum(std::size_t i) const { return S::load(momenta_ + i); }
  SecondMoment<F> variance(std::size_t i) const { return {S::load(variances_ + i), F{}}; }
  void write_momentum(std::size_t i, F m) { S::store(momenta_ + i, m); }
  void write_variance(std::size_t i, const SecondMoment<F>& v) { S::store(variances_ + i, v.value); }
  void finish_momentum() {}
  void finish_variance() {}

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

  Bf16Moments(const UpdateTile& group, const std::uint32_t* random)
      : momenta_(as<std::uint16_t>(group.momentum)), variances_(as<std::uint16_t>(group.variance)), random_(random) {}

  F momentum(std::size_t i) const { return from_bf16(S::load(momenta_ + i)); }
  SecondMoment<F> variance(std::size_t i) const { return {from_bf16(S::load(variances_ + i)), F{}}; }
  void write_momentum(std::size_t i, F m) {
    S::store(momenta_ + i, to_bf16_stochastic(m, S::load(random_ + i) & U(0xffffu)));
  }
  void write_variance(std::size_t i, const SecondMoment<F>& v) {
    S::store(variances_ + i, to_bf16_stochastic(v.value, shift_right<16>(S::load(random_ + i))));
  }
  void finish_momentum() {}
  void finish_variance() {}

 private:
  std::uint16_t* momenta_;
  std::uint16_t* variances_;
  const std::uint32_t* random_;
};

// The scale of a group is known only when all of it is: until then its new moments wait as fp32.
template <class S>
class CompactMoments {
  using F = typename S::F;
  using U = typename S::U;

 public:
  static constexpr bool rounds = true;

  CompactMoments(const UpdateTile& group, const std::uint32_t* random) : group_(group), random_(random) {
    if (group.momentum != nullptr) momentum_scale_ = F(*group.momentum_scales);
    if (group.variance != nullptr) variance_scale_ = F(*group.variance_scales);
  }

  F momentum(std::size_t i) const {
    return expand_momentum(S::load(as<std::uint8_t>(group_.momentum) + i), momentum_scale_);
  }
  SecondMoment<F> variance(std::size_t i) const {
    const F root = expand_root(S::load(as<std::uint8_t>(group_.variance) + i), variance_scale_);
    return {root * root, root};
  }
  void write_momentum(std::size_t i, F m) {
    S::store(momenta_ + i, m);
    largest_momentum_ = max(largest_momentum_, bits(magnitude(m)));
  }
  void write_variance(std::size_t i, const SecondMoment<F>& v) {
    S::store(roots_ + i, v.root);
    largest_root_ = max(largest_root_, bits(v.root));
  }
  void finish_momentum() {
    const F factor = new_scale(largest_momentum_, *group_.momentum_scales);
    for (std::size_t i = 0; i < group_size; i += S::width) {
      S::store(as<std::uint8_t>(group_.momentum) + i,
               compand_momentum(S::load(momenta_ + i), factor, S::load(random_ + i)));
    }
  }
  void finish_variance() {
    const F factor = new_scale(largest_root_, *group_.variance_scales);
    for (std::size_t i = 0; i < group_size; i += S::width) {
      S::store(as<std::uint8_t>(group_.variance) + i, compand_root(S::load(roots_ + i), factor, S::load(random_ + i)));
    }
  }

 private:
  static F new_scale(U largest_lanes, float& scale) {
    const float largest = as_float(S::max_of_lanes(largest_lanes));
    scale = compand_scale(largest);
    return F(compand_factor(largest));
  }

  const UpdateTile group_;
  const std::uint32_t* random_;
  F momentum_scale_;
  F variance_scale_;
  U largest_momentum_{0u};
  U largest_root_{0u};
  alignas(64) float momenta_[group_size];
  alignas(64) float roots_[group_size];
};

}  // namespace ballast::kernels
