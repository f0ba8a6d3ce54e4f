#include <bit>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/kernels/adamw_bytes.h"
#include "benchmarks/kernels/subjects.h"
#include "kernels/random_math.h"
#include "optim/state_layout.h"
#include "optim/step.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t grain = 4096;
constexpr std::size_t elements_of_tile = 512 * 1024;
constexpr std::size_t cached_elements = 8 * 1024;  // 16 bytes each at most: an eighth of a common second-level cache

struct Shard {
  StateFormat format;
  std::size_t tiles;
  std::size_t elements_of_tile;
};

optim::StateLayout layout_of(const Shard& shard) {
  return {{.format = shard.format, .parameter = DType::bf16, .names = optim::AdamW::state}, shard.elements_of_tile};
}

// Fills in bf16 values of both signs, from 2^exponent to twice that.
void fill(std::span<bf16> values, int exponent, const Threads& threads) {
  for_slices(threads, values.size(), grain, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const auto scrambled = static_cast<std::uint32_t>(i) * 2654435761u >> 16;
      values[i].bits = static_cast<std::uint16_t>((scrambled & 0x807fu) | (static_cast<unsigned>(127 + exponent) << 7));
    }
  });
}

// Widens bf16 parameters to fp32 masters. The other formats keep a remainder, which may start as zero.
void widen(std::span<const bf16> parameters, std::uint32_t* masters, const Threads& threads) {
  for_slices(threads, parameters.size(), grain, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      masters[i] = std::uint32_t{parameters[i].bits} << 16;
    }
  });
}

// Gradients, parameters and state, with plausible values, laid out as the library lays out tiles.
class AdamWState {
 public:
  AdamWState(const Shard& shard, const Threads& threads);

  void step(kernels::Backend& backend);

 private:
  Buffer gradient_;
  Buffer parameter_;
  Buffer state_;
  std::vector<TileMemory> tiles_;
  std::size_t steps_ = 0;
};

AdamWState::AdamWState(const Shard& shard, const Threads& threads)
    : gradient_(shard.tiles * shard.elements_of_tile * sizeof(bf16)),
      parameter_(shard.tiles * shard.elements_of_tile * sizeof(bf16)),
      state_(shard.tiles * layout_of(shard).bytes()) {
  fill(gradient_.as<bf16>(), -7, threads);
  fill(parameter_.as<bf16>(), -4, threads);
  const auto layout = layout_of(shard);
  for (std::size_t i = 0; i < shard.tiles; ++i) {
    auto tile = layout.tile(state_.data() + i * layout.bytes());
    const auto parameters = parameter_.as<bf16>().subspan(i * shard.elements_of_tile, shard.elements_of_tile);
    if (shard.format == StateFormat::fp32) {
      widen(parameters, reinterpret_cast<std::uint32_t*>(tile.master), threads);
    }
    tile.parameter = reinterpret_cast<std::byte*>(parameters.data());
    tile.gradient = gradient_.data() + i * shard.elements_of_tile * sizeof(bf16);
    tile.count = shard.elements_of_tile;
    tile.first_index = i * shard.elements_of_tile;
    tiles_.push_back(tile);
  }
}

void AdamWState::step(kernels::Backend& backend) {
  ++steps_;
  const kernels::GroupStep group = optim::at(optim::AdamW{}, {.number = steps_});
  for (auto& tile : tiles_) {
    tile.rounding_stream = kernels::rounding_stream(0, 0, steps_);
    const kernels::Run run{.begin = 0, .count = tile.count, .group = 0};
    backend.update(tile, {&run, 1}, {&group, 1});
  }
}

Subject subject(StateFormat format, std::size_t elements, std::function<void()> run) {
  return {.work = adamw_bytes_of_an_element(format) * static_cast<double>(elements) / 1e9, .run = std::move(run)};
}

Subject from_memory(const Shard& shard, const Setting& setting) {
  const auto state = std::make_shared<AdamWState>(shard, setting.threads);
  const std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = setting.threads.count()});
  return subject(shard.format, shard.tiles * shard.elements_of_tile, [state, backend] { state->step(*backend); });
}

}  // namespace

Subject adamw(StateFormat format, const Setting& setting) {
  return from_memory({format, 1, setting.elements}, setting);
}

Subject adamw_power_of_two(StateFormat format, const Setting& setting) {
  return from_memory({format, 1, std::bit_floor(setting.elements)}, setting);
}

Subject adamw_tiles(StateFormat format, const Setting& setting) {
  const std::size_t tiles = std::max<std::size_t>(1, setting.elements / elements_of_tile);
  return from_memory({format, tiles, elements_of_tile}, setting);
}

Subject adamw_from_cache(StateFormat format, const Setting& setting) {
  const auto threads = static_cast<std::size_t>(setting.threads.count());
  const auto states = std::make_shared<std::vector<AdamWState>>();
  for (std::size_t thread = 0; thread < threads; ++thread) {
    states->emplace_back(Shard{format, 1, cached_elements}, setting.threads);
  }
  const std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  const std::size_t repeats = std::max<std::size_t>(1, setting.elements / (cached_elements * threads));
  return subject(format, repeats * cached_elements * threads, [=, &pool = setting.threads] {
    pool.each(threads, [&](std::size_t thread) {
      for (std::size_t repeat = 0; repeat < repeats; ++repeat) {
        (*states)[thread].step(*backend);
      }
    });
  });
}

}  // namespace ballast::benchmarks
