// Training without a model: gradients are a function of step, rank, element and parameter. So a parameter that comes
// late, twice, from the wrong memory or not at all changes everything that follows.
#pragma once

#include <ballast/training_state.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <vector>

#include "kernels/number_math.h"
#include "kernels/runtime/stream.h"

namespace ballast::testing {

inline float value_of(const ConstView& view, std::size_t i) {
  if (view.dtype() == DType::fp32) return view.as<float>()[i];
  return kernels::from_bf16(std::uint32_t{view.as<bf16>()[i].bits});
}

inline void set_value(const View& view, std::size_t i, float value) {
  if (view.dtype() == DType::fp32) {
    view.as<float>()[i] = value;
  } else {
    view.as<bf16>()[i].bits = static_cast<std::uint16_t>(kernels::to_bf16(value));
  }
}

// Returns a value from -1 to 1 that shows no pattern. Cheap.
inline float noise(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
  return static_cast<float>(static_cast<std::int32_t>(x >> 32)) * 0x1p-31f;
}

inline ParameterSource initial_parameters() {
  return [](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    for (std::size_t i = 0; i < range.count; ++i) {
      set_value(to, i, noise((unit * 1009 + tensor) * 1'000'003 + range.first + i));
    }
  };
}

// A view that the host can read: the view itself, or with a stream, a copy of a GPU's memory after the work in that
// stream.
class Readable {
 public:
  Readable(const ConstView& view, const Stream* stream) : view_(view) {
    if (stream == nullptr) return;
    copy_.resize(view.bytes());
    copy(copy_.data(), view.data(), view.bytes(), *stream);
    stream->synchronize();
    view_ = ConstView(copy_.data(), view.count(), view.dtype());
  }
  Readable(Readable&&) = delete;
  const ConstView& view() const { return view_; }

 protected:
  std::vector<std::byte> copy_;

 private:
  ConstView view_;
};

// A view that the host can write too. What it writes reaches the GPU, in the stream, when this object is destroyed.
class Writable : public Readable {
 public:
  Writable(const View& view, const Stream* stream) : Readable(view, stream), to_(view), stream_(stream) {}
  ~Writable() noexcept(false) {  // a GPU may fail
    if (stream_ == nullptr || std::uncaught_exceptions() > 0) return;
    copy(to_.data(), copy_.data(), to_.bytes(), *stream_);
  }
  View view() { return stream_ != nullptr ? View(copy_.data(), to_.count(), to_.dtype()) : to_; }

 private:
  View to_;
  const Stream* stream_;
};

// Appends the bytes of a unit's tensors, without padding.
inline void add_bytes(const Unit& unit, const Lease& lease, const Stream* stream, std::vector<std::byte>& bytes) {
  for (std::size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
    const Readable readable(lease[tensor], stream);
    const auto more = readable.view().as_bytes();
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
}

// Returns each unit once forward, then once backward. Owners of tied tensors come with the units that they are tied to.
inline Trace plain_order(const Model& model) {
  Trace uses;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit)
    uses.push_back({unit, Phase::forward});
  for (std::size_t unit = model.units.size(); unit-- > 0;)
    uses.push_back({unit, Phase::backward});
  return uses;
}

class SyntheticTrainer {
 public:
  // The trainer works on a GPU in `stream`, which is the training's.
  SyntheticTrainer(const Model& model, std::size_t rank, const Stream* stream = nullptr)
      : model_(model), rank_(rank), stream_(stream) {}

  // One micro-step. Returns what the trainer saw: the parameters of all units, forward and backward.
  std::vector<std::byte> run(Training& training, std::size_t micro_step) {
    return run(training, plain_order(model_), micro_step);
  }

  // The same in another order of uses. A unit's gradients differ from use to use. Exact uses are not seen.
  std::vector<std::byte> run(Training& training, const Trace& uses, std::size_t micro_step) {
    std::vector<std::byte> seen;
    std::map<std::size_t, std::size_t> times;  // the uses of each unit so far
    for (const Visit& use : uses) {
      if (use.exact) {
        const Lease exact = TrainingState(training).exact_parameters(use.unit);
        continue;
      }
      const bool forward = use.phase == Phase::forward;
      const Lease lease = forward ? training.forward(use.unit) : training.backward(use.unit);
      add_bytes(model_.units[use.unit], lease, stream_, seen);
      if (!forward) backward(use.unit, lease, micro_step + 100'000 * times[use.unit]++);
    }
    return seen;
  }

  float poison = 0.0f;  // added to one gradient

 private:
  void backward(std::size_t number, const Lease& lease, std::size_t micro_step) const {
    const Unit& unit = model_.units[number];
    const std::uint64_t seed = ((micro_step * 131 + rank_) * 137 + number) * 1'000'003;
    for (std::size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
      if (unit.tensors[tensor].frozen) continue;
      add(lease.gradient(tensor), lease[tensor], seed + tensor * 7919);
      if (number == 1 && tensor == 0) {
        Writable gradient(lease.gradient(tensor), stream_);
        set_value(gradient.view(), 5, value_of(gradient.view(), 5) + poison);
      }
    }
    for (std::size_t tie = 0; tie < unit.ties.size(); ++tie) {
      const TensorId owner{unit.ties[tie].unit, unit.ties[tie].tensor};
      add(lease.gradient(owner), lease[owner], seed + tie + 499);
    }
  }

  void add(const View& gradient, const ConstView& parameter, std::uint64_t seed) const {
    Writable sum(gradient, stream_);
    const Readable read(parameter, stream_);
    for (std::size_t i = 0; i < gradient.count(); ++i) {
      const float more = noise(seed + i) + 0.1f * value_of(read.view(), i);
      set_value(sum.view(), i, value_of(sum.view(), i) + more);
    }
  }

  const Model& model_;
  std::size_t rank_;
  const Stream* stream_;
};

}  // namespace ballast::testing
