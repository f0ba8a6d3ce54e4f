#include "benchmarks/kernels/adamw.h"

#include <algorithm>

#include "benchmarks/kernels/adamw_rule.h"
#include "kernels/random_math.h"
#include "kernels/state_math.h"

namespace ballast::benchmarks {
namespace {

using kernels::StateFormat;

constexpr std::size_t page = 4096;
constexpr std::size_t cached_elements = 8 * 1024;  // at most 16 bytes each: an eighth of a common second-level cache

// bf16 numbers of both signs from 2^exponent to twice that.
void fill(std::span<bf16> values, int exponent, Threads& threads) {
  threads.for_slices(values.size(), page, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const auto scrambled = static_cast<std::uint32_t>(i) * 2654435761u >> 16;
      values[i].bits = static_cast<std::uint16_t>((scrambled & 0x807fu) | (static_cast<unsigned>(127 + exponent) << 7));
    }
  });
}

// The fp32 master of a bf16 parameter. The other formats keep a remainder, which may start as zero.
void widen(std::span<const bf16> parameters, std::span<std::uint32_t> masters, Threads& threads) {
  threads.for_slices(masters.size(), page, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      masters[i] = std::uint32_t{parameters[i].bits} << 16;
    }
  });
}

std::size_t groups_of(std::size_t elements) { return (elements + kernels::group_size - 1) / kernels::group_size; }

Subject subject(StateFormat format, std::size_t elements, std::function<void()> run) {
  return {.work = adamw_bytes_of_an_element(format) * static_cast<double>(elements) / 1e9, .run = std::move(run)};
}

}  // namespace

double adamw_bytes_of_an_element(StateFormat format) {
  const std::size_t state = kernels::master_bytes(format) + 2 * kernels::moment_bytes(format);
  // A remainder means nothing without the parameter it remains of, which is then read as well as written.
  const std::size_t parameter = format == StateFormat::fp32 ? 2 : 4;
  const double scales = format == StateFormat::compact ? 2.0 * 2 * sizeof(float) / kernels::group_size : 0;
  return static_cast<double>(2 + parameter + 2 * state) + scales;
}

AdamWState::AdamWState(StateFormat format, std::size_t elements, Threads& threads) {
  const bool scaled = format == StateFormat::compact;
  std::byte* const gradient = memory(elements * sizeof(bf16), threads);
  fill(buffers_.back().as<bf16>(), -7, threads);
  std::byte* const parameter = memory(elements * sizeof(bf16), threads);
  fill(buffers_.back().as<bf16>(), -4, threads);
  std::byte* const master = memory(elements * kernels::master_bytes(format), threads);
  if (format == StateFormat::fp32) {
    widen(buffers_[1].as<bf16>(), buffers_.back().as<std::uint32_t>(), threads);
  }
  tile_ = {.format = format,
           .parameter = parameter,
           .gradient = gradient,
           .master = master,
           .momentum = memory(elements * kernels::moment_bytes(format), threads),
           .variance = memory(elements * kernels::moment_bytes(format), threads),
           .count = elements};
  if (scaled) {
    tile_.momentum_scales = reinterpret_cast<float*>(memory(groups_of(elements) * sizeof(float), threads));
    tile_.variance_scales = reinterpret_cast<float*>(memory(groups_of(elements) * sizeof(float), threads));
  }
}

std::byte* AdamWState::memory(std::size_t bytes, Threads& threads) {
  return buffers_.emplace_back(bytes, threads).data();
}

void AdamWState::step(kernels::Backend& backend) {
  ++steps_;
  tile_.rounding_stream = kernels::rounding_stream(0, 0, steps_);
  const kernels::Run run{.begin = 0, .count = tile_.count, .group = 0};
  const kernels::GroupStep group{.rule = adamw_rule(steps_)};
  backend.update(tile_, {&run, 1}, {&group, 1});
}

Subject adamw(StateFormat format, const Setting& setting) {
  const auto state = std::make_shared<AdamWState>(format, setting.elements, setting.threads);
  const std::shared_ptr<kernels::Backend> backend =
      kernels::cpu_backend({.threads = static_cast<int>(setting.threads.count())});
  return subject(format, setting.elements, [state, backend] { state->step(*backend); });
}

Subject adamw_from_cache(StateFormat format, const Setting& setting) {
  const std::size_t threads = setting.threads.count();
  const auto states = std::make_shared<std::vector<AdamWState>>();
  for (std::size_t thread = 0; thread < threads; ++thread) {
    states->emplace_back(format, cached_elements, setting.threads);
  }
  const std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  const std::size_t repeats = std::max<std::size_t>(1, setting.elements / (cached_elements * threads));
  return subject(format, repeats * cached_elements * threads, [=, &pool = setting.threads] {
    pool.for_slices(threads, 1, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first * repeats; i < last * repeats; ++i) {
        (*states)[i / repeats].step(*backend);
      }
    });
  });
}

}  // namespace ballast::benchmarks
