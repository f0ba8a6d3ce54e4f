// The tiers in which parameters, gradients and optimizer state are kept between their uses: a ZeRO stage means nothing more. The
// formats in which summed gradients are kept, and in which ranks send values to each other.
#pragma once

#include <ballast/view.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ballast {

// The tiers, from near to far.
enum class Tier : std::uint8_t { device, host, nvme };
inline constexpr std::size_t tier_count = 3;
using TierBytes = std::array<std::size_t, tier_count>;

std::string_view name(Tier tier);

// The fraction that is kept in each tier. They add up to 1.
struct Spread {
  double device = 1.0;
  double host = 0.0;
  double nvme = 0.0;

  constexpr Spread() = default;
  constexpr Spread(double on_device, double on_host, double on_drives)
      : device(on_device), host(on_host), nvme(on_drives) {}
  constexpr Spread(Tier tier)  // NOLINT(google-explicit-constructor): a tier is all of it
      : device(tier == Tier::device), host(tier == Tier::host), nvme(tier == Tier::nvme) {}

  std::array<double, tier_count> fractions() const { return {device, host, nvme}; }
  bool operator==(const Spread&) const = default;
};

constexpr Spread all_in(Tier tier) { return tier; }

// When gradients are summed over the ranks. The two round differently, as (a + b) + c and a + (b + c) do. Programs with
// the same choice give equal bits.
enum class Reduction : std::uint8_t {
  each,      // sums after each backward use
  boundary,  // once a step: the trainer adds up its micro-steps in full gradients, in the unit's format
};

struct Placement {
  std::size_t shards = 1;       // ranks that share one copy of the state
  std::size_t replicas = 1;     // copies of it
  bool full_parameters = true;  // kept gathered between steps
  Reduction reduction = Reduction::each;
  Spread parameters{};  // a tier for each unit
  Spread gradients{};   // a tier for each unit's reduced ones; never on a drive
  Spread state{};       // a tier for each tile: its master and moments
  // Stage 3 has copies of the parameters. Neighbouring ranks share one, and gather from each other only.
  std::size_t parameter_replicas = 1;

  std::size_t ranks() const { return shards * replicas; }
  // Ranks form groups of neighbours. Gradients are summed inside of the groups first, and then over them.
  std::size_t ranks_per_group() const { return shards / parameter_replicas; }
  std::size_t groups() const { return replicas * parameter_replicas; }
  bool operator==(const Placement&) const = default;
};

// Stage 0: every rank keeps everything. 1 and 2: ranks shard the optimizer's state and the reduced gradients. 3: they
// shard the parameters too. Stages 1 and 2 are equal: the reduction decides whether a rank keeps full gradients.
Placement placement_of_stage(int stage, std::size_t ranks);

// Throws B1001 for fractions that do not add up, full parameters outside the device, gradients on a drive.
void check(const Placement& placement);

// The format of gradients that are summed over the ranks and kept until the update: see docs/concepts/state-formats.md. With
// bf16, the sum over the ranks of one backward use is rounded once, to nearest; later uses of a step are added with stochastic
// rounding.
enum class GradientFormat : std::uint8_t { fp32, bf16 };

constexpr std::string_view name(GradientFormat format) {
  constexpr std::string_view names[] = {"fp32", "bf16"};
  return names[static_cast<std::size_t>(format)];
}

// The format applies to parameters in bf16. Gradients of fp32 and fp16 parameters would lose bits, and are kept in fp32.
constexpr DType dtype_of_sums(GradientFormat format, DType parameter) {
  return format == GradientFormat::bf16 && parameter == DType::bf16 ? DType::bf16 : DType::fp32;
}

// The formats in which ranks send values. Exact: the format that the values have. Else codes of 8 or 4 bits, and an fp32 scale for
// each group of 128 values.
enum class WireFormat : std::uint8_t { exact, int8, int4 };

constexpr std::string_view name(WireFormat format) {
  constexpr std::string_view names[] = {"exact", "int8", "int4"};
  return names[static_cast<std::size_t>(format)];
}

// See docs/guides/slow-links.md. Gathers round to nearest, reductions stochastically, by random bits that depend on
// the step, the rank and the element. Norms, decisions and loading stay exact.
struct Wire {
  WireFormat gather = WireFormat::exact;  // parameters, at stage 3; not int4
  WireFormat reduce = WireFormat::exact;  // each rank's gradients
  // Sums of several ranks' gradients: those of a host with several ranks, on their way to other hosts; those of a shard
  // group, on their way to its replicas; and at stage 0 the sum, on its way to all ranks. None: as `reduce`.
  std::optional<WireFormat> across{};

  WireFormat sums() const { return across.value_or(reduce); }
  bool operator==(const Wire&) const = default;
};

}  // namespace ballast
