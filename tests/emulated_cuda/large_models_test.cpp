// Trainings of large models on few GPUs, as `ballast plan` places them. Real memory is taken by the same model with every
// width divided: its program has the same operations, on smaller pieces.
#include <catch2/catch.hpp>
#include <span>
#include <tuple>

#include "offload/record_format.h"
#include "tests/emulated_cuda/emulated.h"
#include "tests/plan/large_models.h"
#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"
#include "zero/plan/compile.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t GiB = std::size_t{1} << 30;
constexpr std::size_t tile = std::size_t{16} << 20;  // larger than those of a plan, so that there are few
constexpr Spread on_host{0, 1, 0};

struct Case {
  std::string name;
  LlamaShape shape;
  std::size_t ranks = 1;
  Spread parameters{}, gradients{}, state{};
  StateFormat format = StateFormat::four_bit;
  GradientFormat gradient_format = GradientFormat::fp32;
  bool clips = false;
  TierBytes free{};  // bytes for a rank, without what activations and CUDA take
};

// The vocabulary has more words than the model's, as many as make its tiles of equal size at any scale.
constexpr LlamaShape about_llama_70b{llama_70b.layers, llama_70b.width, llama_70b.hidden, llama_70b.key_value_width,
                                     131072};

// The placements are those that `ballast plan` prints for these machines, with the smallest formats that it needs.
const std::vector<Case> cases{
    {.name = "70B on 8 H100, clipped",
     .shape = about_llama_70b,
     .ranks = 8,
     .gradient_format = GradientFormat::bf16,
     .clips = true,
     .free = {60 * GiB}},
    {.name = "70B on one H200 with 128 GiB and 64 GiB of drives",
     .shape = about_llama_70b,
     .parameters = {0.465, 0.535, 0},
     .gradients = {0.465, 0.535, 0},
     .state = {0.655, 0, 0.345},
     .free = {120 * GiB, 128 * GiB, 64 * GiB}},
    {.name = "32B on one H100 with 128 GiB",
     .shape = qwen_32b,
     .parameters = {0.345, 0.655, 0},
     .gradients = {0.345, 0.655, 0},
     .format = StateFormat::compact,
     .free = {64 * GiB, 128 * GiB}},
    {.name = "32B on one H100 with 128 GiB, clipped",
     .shape = qwen_32b,
     .parameters = on_host,
     .state = on_host,
     .gradient_format = GradientFormat::bf16,
     .clips = true,
     .free = {71 * GiB, 128 * GiB}},
    {.name = "14B on one card of 24 GB with 64 GiB",
     .shape = qwen_14b,
     .parameters = on_host,
     .state = on_host,
     .gradient_format = GradientFormat::bf16,
     .free = {10 * GiB - GiB / 32, 64 * GiB}},
};

// The model without norms, which are few elements and fill no tile, and with a part of the elements of each other tensor.
Model part_of(const LlamaShape& shape, std::size_t divisor) {
  Model model = llama(shape);
  for (Unit& unit : model.units) {
    std::erase_if(unit.tensors, [](const Tensor& tensor) { return tensor.group == 1; });
    for (Tensor& tensor : unit.tensors) {
      tensor.shape = {tensor.elements() / divisor};
    }
  }
  std::erase_if(model.units, [](const Unit& unit) { return unit.tensors.empty(); });
  return model;
}

const std::vector<optim::Rule> rules(2, optim::AdamW{});

TrainingOptions options_of(const Case& each, std::size_t tile_elements) {
  return {.parameters = each.parameters,
          .gradients = each.gradients,
          .state = each.state,
          .format = each.format,
          .gradient_format = each.gradient_format,
          .tile_elements = tile_elements,
          .schedule = {.update_in_backward = !each.clips},
          .max_norm = each.clips ? 1.0 : optim::no_clipping,
          .threads = 1,
          .gpu = 0};
}

// The operations of a step, without the sizes of what they move and compute, and the waits that follow from those.
std::vector<Op> structure(const Plan& plan) {
  std::vector<Op> ops = compiled(plan).program().ops;
  for (Op& op : ops) {
    for (Piece* const piece : {&op.from, &op.to, &op.state}) {
      piece->begin = piece->bytes = 0;
    }
  }
  return ops;
}

bool same_structure(const Plan& one, const Plan& other) {
  return std::ranges::equal(structure(one), structure(other), [](const Op& a, const Op& b) {
    return std::tie(a.kind, a.lane, a.phase, a.unit, a.tile, a.ranks, a.sum, a.from, a.to, a.state) ==
           std::tie(b.kind, b.lane, b.phase, b.unit, b.tile, b.ranks, b.sum, b.from, b.to, b.state);
  });
}

TierBytes reserved_by(const Training& training) {
  TierBytes bytes{};
  for (const MemoryAccounts::Entry& entry : training.memory().entries()) {
    bytes[static_cast<std::size_t>(entry.kind == MemoryKind::device ? Tier::device : Tier::host)] += entry.usage.peak;
  }
  return bytes;
}

// The bytes in files that this process has open, also deleted ones, after what each begins with.
std::size_t bytes_of_records(const std::filesystem::path& folder) {
  std::size_t bytes = 0;
  for (const auto& descriptor : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    if (std::filesystem::read_symlink(descriptor, closed).string().starts_with(folder.string() + "/")) {
      bytes += std::filesystem::file_size(descriptor) - (offload::block_bytes + 2 * offload::commit_bytes);
    }
  }
  return bytes;
}

void step(Training& training, const Stream& stream) {
  for (const Visit& use : plain_order(training.model())) {
    const bool forward = use.phase == Phase::forward;
    const Lease lease = forward ? training.forward(use.unit) : training.backward(use.unit);
    if (forward) continue;
    Writable gradient(lease.gradient(0).part(0, 1), &stream);
    set_value(gradient.view(), 0, 0.5f);
  }
  training.step();
}

struct Measured {
  TierBytes planned{}, taken{};
};

Measured measure(const Case& each, std::size_t divisor, Communicator& world) {
  const TemporaryDirectory folder;
  const Stream stream(0);
  TrainingOptions options = options_of(each, tile / divisor);
  options.stream = stream.handle();
  options.drives.directories = {folder.path()};
  Training training(part_of(each.shape, divisor), world, rules, options);
  training.initialize(
      [](std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as_bytes(), std::byte{0x3c}); });
  for (int i = 0; i < 2; ++i) {
    step(training, stream);
  }
  training.finish();
  Measured found{.planned = bytes_by_tier(training.ledger()), .taken = reserved_by(training)};
  found.taken[static_cast<std::size_t>(Tier::nvme)] = bytes_of_records(folder.path());
  return found;
}

Measured measure(const Case& each, std::size_t divisor) {
  Measured found;
  const auto train = [&](Communicator& world) {
    const Measured mine = measure(each, divisor, world);
    if (world.rank() == 0) found = mine;
  };
  const auto failures = failures_of_ranks(each.ranks, train, std::chrono::minutes(10));  // gigabytes, on few cores
  REQUIRE(failures == std::vector<std::string>(each.ranks));
  return found;
}

void check(const Case& each, std::size_t divisor) {
  CAPTURE(each.name, divisor);
  const Plan large(part_of(each.shape, 1), {0, each.ranks}, rules, options_of(each, tile));
  const Plan small(part_of(each.shape, divisor), {0, each.ranks}, rules, options_of(each, tile / divisor));
  CHECK(same_structure(large, small));
  const Plan used(llama(each.shape), {0, each.ranks}, rules, options_of(each, 0));
  const TierBytes needed = bytes_by_tier(used.ledger());
  const Measured measured = measure(each, divisor);
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    CAPTURE(name(static_cast<Tier>(tier)));
    CHECK(needed[tier] <= each.free[tier]);
    CHECK(measured.planned[tier] == measured.taken[tier]);
  }
}

}  // namespace

TEST_CASE("plans of large models fit their machines, and copies of a 16384th of the size reserve the planned bytes") {
  for (const Case& each : std::span(cases).last(sanitized ? 1 : cases.size())) {  // the smallest is the last
    check(each, 16384);
  }
}

TEST_CASE("copies of a 64th of the size of large models reserve the planned bytes", "[.large]") {
  emulated::set_machine({.gpus = 1, .memory_bytes = 16 * GiB});
  for (const Case& each : cases) {
    DYNAMIC_SECTION(each.name) { check(each, 64); }
  }
}
