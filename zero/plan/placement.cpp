#include <ballast/error.h>
#include <ballast/placement.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ballast {
namespace {

[[noreturn]] void refuse(std::string what, std::string needed) {
  fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
}

void check(std::string_view what, const Spread& spread) {
  const auto fractions = spread.fractions();
  const bool in_range = std::ranges::all_of(fractions, [](double x) { return x >= 0.0 && x <= 1.0; });
  const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  if (!in_range || std::abs(sum - 1.0) > 1e-6) {
    refuse(fmt::format("cannot place {}: the fractions are {} on the device, {} on the host and {} on drives", what,
                       spread.device, spread.host, spread.nvme),
           "fractions from 0 to 1 that add up to 1");
  }
}

void check_parameter_replicas(const Placement& placement) {
  const std::size_t copies = placement.parameter_replicas;
  if (copies == 1) return;
  if (copies == 0 || placement.shards % copies != 0 || placement.shards == copies) {
    refuse(fmt::format("cannot keep {} copies of the parameters on {} ranks", copies, placement.shards),
           "a number that the number of ranks can be divided by, and several ranks for each copy");
  }
  if (placement.full_parameters) {
    refuse(fmt::format("cannot share {} copies of the parameters: below stage 3 each rank has a whole one", copies),
           "stage 3, or one copy");
  }
  if (placement.replicas > 1) {
    refuse(fmt::format("cannot keep {} copies of the parameters and {} of the state", copies, placement.replicas),
           "several copies of one of them");
  }
  if (placement.parameters != Spread{}) {
    refuse(fmt::format("cannot keep {} copies of the parameters outside of the device", copies),
           "parameters on the device, or one copy");
  }
}

}  // namespace

std::string_view name(Tier tier) {
  constexpr std::string_view names[] = {"device", "host", "nvme"};
  return names[static_cast<std::size_t>(tier)];
}

Placement placement_of_stage(int stage, std::size_t ranks) {
  require(stage >= 0 && stage <= 3, Code::bad_argument,
          [&] { return Problem{.what = fmt::format("there is no stage {}", stage), .needed = "0, 1, 2 or 3"}; });
  return {.shards = stage == 0 ? 1 : ranks, .replicas = stage == 0 ? ranks : 1, .full_parameters = stage < 3};
}

void check(const Placement& placement) {
  if (placement.shards == 0 || placement.replicas == 0) {
    refuse(fmt::format("cannot place a model on a mesh of {} x {} ranks", placement.shards, placement.replicas),
           "at least one rank each way");
  }
  check_parameter_replicas(placement);
  check("parameters", placement.parameters);
  check("gradients", placement.gradients);
  check("optimizer states", placement.state);
  if (placement.gradients.nvme > 0.0) refuse("cannot keep gradients on a drive", "the device or the host");
  if (placement.full_parameters && placement.parameters != Spread{}) {
    refuse("cannot keep full parameters outside the device", "stage 3, or parameters on the device");
  }
}

}  // namespace ballast
