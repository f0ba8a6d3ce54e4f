// A run that other ranks continue, with the state of all elements that it should have then.
#pragma once

#include "tests/zero/kept_run.h"

namespace ballast::testing {

// Units of different formats, with padding, a tensor of no elements, and names that several units have.
inline Model several_units() {
  return {{{.name = "embedding", .tensors = {{"weight", {30, 29}}}},
           {.name = "h.0", .tensors = {{"w", {700}}, {"fixed", {450}, 0, true}, {"b", {3}}}},
           {.name = "norm", .dtype = DType::fp32, .tensors = {{"gain", {50}}}},
           {.name = "nothing", .tensors = {{"empty", {0}}}}}};
}

inline KeptRun run_of(std::size_t ranks, int stage = 3) {
  return {.model = several_units(),
          .ranks = ranks,
          .shows_values = true,
          .options = {.stage = stage, .state = all_in(Tier::nvme), .tile_elements = 256}};
}

inline std::vector<std::string> no_failures(std::size_t ranks) { return std::vector<std::string>(ranks); }

inline Ended begun(KeptRun& run, const TemporaryDirectory& directory, std::size_t steps = steps_before) {
  run.directory = directory.path();
  Ended ended = train(run, steps);
  REQUIRE(ended.failures == no_failures(run.ranks));
  return ended;
}

// Checks that the run resumes at a step with these values, and that nothing is left of other ranks.
inline void check_resumes(const KeptRun& run, const AllValues& values, std::size_t step = steps_before) {
  const Ended resumed = train(run, 0);
  CHECK(resumed.failures == no_failures(run.ranks));
  CHECK(resumed.began_at == std::vector<std::uint64_t>(run.ranks, step));
  CHECK((resumed.values == values));
  if (!run.hosts.empty()) return;
  std::size_t files = 0;
  for (const auto& [path, content] : contents(run.directory))
    files += path.ends_with(".records") ? 1u : 0u;
  CHECK(files == run.ranks);
}

inline std::string names_in(const std::filesystem::path& directory) {
  std::string names;
  for (const auto& [path, content] : contents(directory))
    names += std::filesystem::path(path).filename().string() + " ";
  return names;
}

}  // namespace ballast::testing
