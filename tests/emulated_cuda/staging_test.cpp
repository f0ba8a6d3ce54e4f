// A training's start and its moves from and to the GPU use pinned memory, and wait for the GPU a few times.
#include <catch2/catch.hpp>

#include "kernels/state_access.h"
#include "tests/emulated_cuda/emulated.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t staged_at_once = std::size_t{16} << 20;  // bytes

struct Cost {
  std::size_t waits = 0;  // the host's waits for the GPU
  std::size_t slow_copies = 0;
};

Cost cost_of(const std::function<void()>& work) {
  emulated::reset_counts();
  work();
  emulated::Counts counts = emulated::counts();
  return {counts["cudaStreamSynchronize"] + counts["cudaEventSynchronize"], counts["copy that waits"]};
}

// A training on GPU 0, or on the CPU.
class Rig {
 public:
  Rig(const Model& model, TrainingOptions options, bool on_gpu = true) {
    if (on_gpu) options.gpu = 0, options.stream = stream_.emplace(0).handle();
    const std::vector<optim::Rule> rules(2, optim::AdamW{.lr = 0.02});
    training.emplace(model, *world_, rules, options);
  }

  void step(std::size_t number) {
    SyntheticTrainer trainer(training->model(), 0, stream_ ? &*stream_ : nullptr);
    trainer.run(*training, number);
    training->step();
  }

  // Parameters, masters and moments, of the format fp32.
  std::vector<std::byte> state() {
    std::vector<std::byte> all;
    TrainingState(*training).visit([&](const LocalTile& tile) {
      const TileMemory& memory = tile.memory;
      all.insert(all.end(), memory.parameter, memory.parameter + memory.count * byte_size(memory.parameter_dtype));
      for (const std::byte* const part : {memory.master, memory.momentum, memory.variance}) {
        if (part != nullptr) all.insert(all.end(), part, part + memory.count * sizeof(float));
      }
    });
    return all;
  }

 private:
  std::unique_ptr<kernels::Backend> backend_ = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> world_ = lone_communicator(*backend_);
  std::optional<Stream> stream_;

 public:
  std::optional<Training> training;
};

struct PlacementCase {
  int stage = 0;
  Spread parameters{};
  Spread state{};
};

const TrainingOptions all_on_device{.format = StateFormat::fp32};

// Compares the waits of trainings that differ in their tiles alone.
void check_waits(const TransferRates& rates, std::initializer_list<std::size_t> tile_sizes) {
  using enum Tier;
  for (const auto& [stage, parameters, state] :
       {PlacementCase{0, Spread(device), Spread(device)}, PlacementCase{0, Spread(device), {0.5, 0.5, 0.0}},
        PlacementCase{3, Spread(device), Spread(host)}, PlacementCase{3, Spread(host), Spread(host)}}) {
    std::vector<std::vector<std::size_t>> waits;  // one entry for each size of a tile
    for (const std::size_t tile_elements : tile_sizes) {
      CAPTURE(rates.upload, stage, parameters.fractions(), state.fractions(), tile_elements);
      Rig rig(
          plain_model(3, 50'000),
          {.stage = stage, .parameters = parameters, .state = state, .tile_elements = tile_elements, .rates = rates});
      const Cost start = cost_of([&] { rig.training->initialize(initial_parameters()); });
      rig.step(0);
      rig.training->finish();
      const Cost offload = cost_of([&] { TrainingState(*rig.training).offload(); });
      const Cost reload = cost_of([&] { TrainingState(*rig.training).reload(); });
      CHECK(start.slow_copies + offload.slow_copies + reload.slow_copies == 0);
      waits.push_back({start.waits, offload.waits, reload.waits});
    }
    CHECK(waits[1] == waits[0]);
    CHECK(waits[2] == waits[0]);
  }
}

}  // namespace

TEST_CASE("pages are resident before they are pinned") {
  const std::size_t before = emulated::pages_populated_by_pinning();
  Rig rig(plain_model(2, 100'000), {.gradients = {0.5, 0.5, 0.0}, .state = Tier::host});
  rig.training->initialize(initial_parameters());
  rig.step(0);
  TrainingState(*rig.training).offload();
  TrainingState(*rig.training).reload();
  CHECK(TrainingState(*rig.training).unpinned_because().empty());
  CHECK(emulated::pages_populated_by_pinning() == before);
}

TEST_CASE("the number of waits in a start and in moves does not grow with the number of tiles") {
  check_waits({}, {16384, 4096, 1024});  // the host updates its tiles alone
  // Both processors update those of the host, whose blocks are of two kinds then: a unit has to have several of them.
  check_waits(TrainingOptions{}.rates, {8192, 4096, 1024});
}

TEST_CASE("more bytes than are staged at once come and go with their bits") {
  constexpr std::size_t stages = sanitized ? 1 : 2;  // each stage has elements of four bytes
  constexpr std::size_t elements = stages * staged_at_once / 4 + 12345;
  const Model model = plain_model(1, elements);
  Rig on_cpu(model, all_on_device, false), on_gpu(model, all_on_device);
  const auto source = initial_parameters();
  on_cpu.training->initialize(source);
  CHECK(cost_of([&] { on_gpu.training->initialize(source); }).slow_copies == 0);
  const std::vector<std::byte> initial = on_cpu.state();
  CHECK((on_gpu.state() == initial));  // the bytes are too many to print
  const auto change = [](const LocalTile& tile) {
    std::vector<float> values(tile.memory.count);
    for (const Moment moment : {Moment::momentum, Moment::variance}) {
      std::ranges::generate(values, [i = tile.range.first]() mutable { return std::abs(noise(++i)); });
      kernels::write_moment(tile.memory, moment, values);
    }
  };
  TrainingState(*on_cpu.training).change(change);
  TrainingState(*on_gpu.training).change(change);
  const std::size_t most_waits = 9 + 14 * elements / staged_at_once;
  for (const bool parameters : sanitized ? std::vector{true} : std::vector{true, false}) {
    const Cost offload = cost_of([&] { TrainingState(*on_gpu.training).offload(parameters); });
    const Cost reload = cost_of([&] { TrainingState(*on_gpu.training).reload(); });
    CHECK(offload.slow_copies + reload.slow_copies == 0);
    CHECK(offload.waits <= most_waits);
    CHECK(reload.waits <= most_waits);
    CHECK((on_gpu.state() == on_cpu.state()));
  }
}

TEST_CASE("the state is read and changed through pinned memory") {
  Rig rig(odd_model(), {.state = {0.5, 0.5, 0.0}, .format = StateFormat::fp32, .tile_elements = 256});
  rig.training->initialize(initial_parameters());
  rig.step(0);
  const std::vector<std::byte> before = rig.state();
  CHECK(cost_of([&] { TrainingState(*rig.training).change([](const LocalTile&) {}); }).slow_copies == 0);
  CHECK(cost_of([&] { CHECK((rig.state() == before)); }).slow_copies == 0);
}

TEST_CASE("nothing of the staging memory is left, on the GPU or in the accounts") {
  emulated::Live before{};
  Rig rig(odd_model(), {.state = {0.5, 0.5, 0.0}});
  before = emulated::live();
  before.device_bytes += TrainingState(*rig.training).unreserved_bytes();
  rig.training->initialize(initial_parameters());
  CHECK(TrainingState(*rig.training).unreserved_bytes() == 0);
  TrainingState(*rig.training).visit([](const LocalTile&) {});
  TrainingState(*rig.training).offload();
  TrainingState(*rig.training).reload();
  CHECK(emulated::live() == before);
  CHECK(rig.training->memory().usage(MemoryKind::pinned, "staging").peak == 0);
}

// The call that fails is each of the first ones, and one of them pins.
TEST_CASE("a training moves with the same bits where the driver refuses to pin memory") {
  bool was_refused = false;
  for (std::size_t call = 1; call < 30; ++call) {
    Rig rig(odd_model(), {.format = StateFormat::fp32, .tile_elements = 256});
    rig.training->initialize(initial_parameters());
    rig.step(0);
    const std::vector<std::byte> before = rig.state();
    emulated::fail_call(call, cudaErrorMemoryAllocation);
    std::size_t slow_copies = 0;
    try {
      slow_copies = cost_of([&] { TrainingState(*rig.training).offload(); }).slow_copies;
    } catch (const Error&) {
      emulated::fail_no_call();
      continue;
    }
    emulated::fail_no_call();
    TrainingState(*rig.training).reload();
    CHECK((rig.state() == before));
    was_refused = was_refused || slow_copies > 0;
  }
  CHECK(was_refused);
}
