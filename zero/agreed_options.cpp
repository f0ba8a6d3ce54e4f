#include "zero/agreed_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "kernels/runtime/device.h"
#include "kernels/runtime/machine.h"
#include "optim/step.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/runs/joint_space.h"
#include "zero/runs/records.h"

namespace ballast {
namespace {

// Returns a short text that differs where traces do: a whole trace takes pages.
std::string text_of(const Trace& trace) {
  std::string uses;
  for (const Visit& visit : trace)
    uses += fmt::format("{} {} {} {};", visit.unit, name(visit.phase), visit.held, visit.exact);
  return fmt::format("{} uses with the digest {:x}", trace.size(), std::hash<std::string>()(uses));
}

std::vector<NamedValue> named_options(const TrainingOptions& options, const std::vector<optim::Rule>& groups) {
  std::vector<NamedValue> named;
  const auto add = [&](std::string_view name, const auto& value) { named.emplace_back(name, fmt::to_string(value)); };
  const auto text = [](const Spread& spread) { return fmt::format("{}", fmt::join(spread.fractions(), ", ")); };
  add("stage", options.stage);
  add("replicas", options.replicas);
  add("parameter_replicas", options.parameter_replicas);
  add("tiers of parameters", text(options.parameters));
  add("tiers of gradients", text(options.gradients));
  add("tiers of state", text(options.state));
  add("reduction", static_cast<int>(options.reduction));
  add("run", options.drives.run);
  add("mirror", options.drives.mirror);
  add("format", name(options.format));
  add("gradient_format", name(options.gradient_format));
  add("tile_elements", options.tile_elements);
  add("micro_steps", options.micro_steps);
  add("sums_micro_steps", options.sums_micro_steps);
  add("trace", text_of(options.trace));
  add("prefetch", options.schedule.prefetch);
  add("gathered_bytes", options.schedule.gathered_bytes);
  add("layer_major", options.schedule.layer_major);
  add("update_in_backward", options.schedule.update_in_backward);
  add("most_repeats", options.schedule.most_repeats);
  add("overlap_gathers", options.schedule.overlap_gathers);
  add("wire",
      fmt::format("{}, {}, {}", name(options.wire.gather), name(options.wire.reduce), name(options.wire.sums())));
  add("max_norm", options.max_norm);
  add("verify", options.verify);
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const auto& [name, value] : optim::named_options(groups[group]))
      add(fmt::format("{} of parameter group {}", name, group), value);
  }
  return named;
}

std::vector<std::string> named_parameters(const Model& model) {
  std::vector<std::string> lines;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      lines.push_back(fmt::format("{} of unit {}, {} of shape [{}], {} {}", tensor.name, unit.name, name(unit.dtype),
                                  fmt::join(tensor.shape, ", "), tensor.frozen ? "frozen" : "in parameter group",
                                  tensor.group));
    }
    for (const Tie& tie : unit.ties)
      lines.push_back(
          fmt::format("{} of unit {}, tied to tensor {} of unit {}", tie.name, unit.name, tie.tensor, tie.unit));
  }
  return lines;
}

}  // namespace

TrainingOptions agreed_options(TrainingOptions options, const std::vector<optim::Rule>& groups, const Model& model,
                               Communicator& world, Log& warnings) {
  RecordOptions& drives = options.drives;
  if (drives.log == nullptr) drives.log = options.log != nullptr ? options.log : &warnings;
  if (world.size() > 1) {
    require_same_options(world, named_options(options, groups));
    require_same_parameters(world, named_parameters(model));
    world.broadcast({reinterpret_cast<std::byte*>(&options.rates), sizeof options.rates, DType::u8}, 0);
  }
  if (options.tile_elements == 0 && !drives.run.empty() && !drives.directories.empty()) {
    options.tile_elements = tile_of_run(world, drives);
  }
  options.threads = threads_of_rank(world, options);
  return options;
}

int threads_of_rank(Communicator& world, const TrainingOptions& options) {
  const std::vector<int> cores = options.gpu ? cores_near(device::pci(*options.gpu)) : allowed_cores();
  const std::string mine = fmt::format("{} {}", booted_machine(), fmt::join(cores, ","));
  std::size_t ranks = 1;  // those that use these cores: in the group of data, times those in the group of parts
  for (Communicator* group : {&world, options.norm_group}) {
    if (group != nullptr && group->size() > 1)
      ranks *= static_cast<std::size_t>(std::ranges::count(texts_of_all(*group, mine), mine));
  }
  if (options.threads != 0) return options.threads;  // other ranks may have named none, so all make the exchange
  const std::size_t share = std::max<std::size_t>(std::min(cores.size(), usable_cores()) / ranks, 1);
  return static_cast<int>(options.gpu && share > 1 ? share - 1 : share);
}

}  // namespace ballast
