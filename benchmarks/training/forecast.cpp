// Measures how fast this machine moves bytes, and forecasts the time of a step with the simulator, from those rates and the time
// of one block's arithmetic.
#include <ballast/comm.h>
#include <ballast/planner.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>

#include "benchmarks/harness/measure.h"
#include "benchmarks/kernels/elementwise.h"
#include "benchmarks/training/run.h"
#include "kernels/runtime/buffer.h"
#include "offload/record_store.h"
#include "zero/plan/compile.h"
#include "zero/plan/simulate.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t rounds = 7;
constexpr std::size_t slots = 8;  // records in flight, as in the engine

// A drive of a virtual machine gave 1.6 to 3.4 GB/s from one half second to the next, and 2.8 to 3.0 in any two or
// three. So the rates are means over all moved bytes, not medians of short rounds. Reading alone is a small part of a
// step's work.
constexpr double seconds_of_reading = 1.0;
constexpr double seconds_of_both = 2.5;
constexpr std::size_t copied_bytes = std::size_t{64} << 20;  // more than the caches hold

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Measures with the code of the engine. All ranks measure at the same time, so that each gets its share of common resources. The
// result is the same on all ranks: the rates of the slowest.
class MachineRates {
 public:
  MachineRates(Communicator& world, const TrainingOptions& options, const UnitLayout& block)
      : world_(world),
        options_(options),
        elements_(block.elements()),
        plan_({.units = {{.name = "unit", .tensors = {{"weight", {elements_}}}}}},
              {.tile_elements = std::max(block.tile_elements, block.device_elements),
               .format = options.format,
               .names = optim::AdamW::state}) {}

  // Moves at most so many bytes of a rank's records on drives; with 0, drives are not measured.
  Machine measure(std::size_t drive_bytes) {
    Machine machine{.shares_cores = true};
    machine.collective_latency = slowest([&] { gather(byte_size(DType::bf16)); });
    const double others = static_cast<double>(world_.size() - 1) / static_cast<double>(world_.size());
    const std::size_t unit_bytes = elements_ * byte_size(DType::bf16);
    const double moved = others * static_cast<double>(unit_bytes);
    // Nothing moves with one rank, and any rate will do.
    const auto rate = [&](double seconds) {
      return moved > 0 ? moved / std::max(1e-9, seconds - machine.collective_latency) : 1e12;
    };
    machine.gather = rate(slowest([&] { gather(unit_bytes); }));
    machine.reduce = rate(slowest([&] { reduce(unit_bytes); }));
    machine.upload = machine.download = rate_of_copies();
    machine.host_memory = machine.device_memory = rate_of_updates();
    if (drive_bytes > 0) measure_drives(machine, drive_bytes);
    return machine;
  }

 private:
  // Returns the median of the rounds, on the slowest rank.
  double slowest(const std::function<void()>& work) {
    std::vector<double> seconds;
    for (std::size_t round = 0; round < rounds; ++round) {
      world_.barrier();
      const auto begin = Clock::now();
      work();
      seconds.push_back(seconds_since(begin));
    }
    return slowest_ranks(median(seconds));
  }

  // Returns the mean of at least two rounds and this many seconds, on the slowest rank.
  double slowest_mean(double least_seconds, const std::function<void()>& work) {
    world_.barrier();
    const auto begin = Clock::now();
    std::size_t round = 0;
    for (; round < 2 || seconds_since(begin) < least_seconds; ++round) {
      work();
    }
    return slowest_ranks(seconds_since(begin) / static_cast<double>(round));
  }

  double slowest_ranks(double seconds) {
    std::vector<std::int64_t> nanoseconds(world_.size());
    nanoseconds[world_.rank()] = static_cast<std::int64_t>(seconds * 1e9);
    world_.all_reduce(nanoseconds);
    return static_cast<double>(std::ranges::max(nanoseconds)) * 1e-9;
  }

  void gather(std::size_t bytes) {
    const std::size_t mine = bytes / world_.size();
    const View all(exchanged(mine * world_.size()), mine * world_.size(), DType::u8);
    world_.all_gather(all.part(world_.rank() * mine, mine), all);
  }

  void reduce(std::size_t bytes) {
    const std::size_t mine = bytes / byte_size(DType::bf16) / world_.size();
    std::byte* const memory = exchanged(mine * (world_.size() * byte_size(DType::bf16) + sizeof(float)));
    const View all(memory, mine * world_.size(), DType::bf16);
    const View part(memory + all.bytes(), mine, DType::fp32);
    world_.reduce_scatter(all, part);
  }

  double rate_of_copies() {
    std::byte* const from = own(2 * copied_bytes);
    return static_cast<double>(copied_bytes) / slowest([&] { std::memcpy(from + copied_bytes, from, copied_bytes); });
  }

  // Updates the whole tiles of a unit. Counts bytes as the simulator does.
  double rate_of_updates() {
    const std::size_t tile = plan_.layout().units[0].tiles.front().count, tiles = elements_ / tile;
    const std::size_t bytes_of_element = sizeof(float) + 2 * byte_size(DType::bf16);
    const std::size_t bytes = tiles * (tile * bytes_of_element + 2 * plan_.blocks().of(0).state);
    const Subject updates =
        adamw(cpu_place(options_.threads), options_.format, tiles * tile, tile, {.dtype = DType::fp32});
    return static_cast<double>(bytes) / slowest(updates.run);
  }

  void measure_drives(Machine& machine, std::size_t drive_bytes) {
    const std::size_t record = plan_.blocks().records().record;
    const std::size_t tiles = std::max(slots, std::min(drive_bytes, quarter_of_free_space()) / record);
    world_.barrier();  // all ranks have read the free space before one takes some of it
    std::byte* const memory = own(slots * record);
    std::minstd_rand noise;  // some drives compress zeros
    std::ranges::generate(std::span(reinterpret_cast<std::uint32_t*>(memory), slots * record / 4), noise);
    std::vector<std::unique_ptr<offload::IoQueue>> queues;
    std::vector<offload::Drive> drives;
    for (const std::filesystem::path& directory : options_.drives.directories) {
      drives.push_back({directory, queues.emplace_back(offload::open_queue({.depth = 16})).get()});
    }
    auto store = offload::RecordStore::scratch(plan_.blocks().shape(tiles), drives);
    const auto slot = [&](std::size_t tile) { return std::span(memory + tile % slots * record, record); };
    const auto bytes = static_cast<double>(tiles * record);
    const double reading = slowest_mean(seconds_of_reading, [&] {
      std::vector<offload::PendingRead> reads(slots);
      for (std::size_t tile = 0; tile < tiles + slots; ++tile) {
        if (tile >= slots) reads[tile % slots].payload();
        if (tile < tiles) reads[tile % slots] = store.read(tile, slot(tile));
      }
    });
    const double both = slowest_mean(seconds_of_both, [&] { rewrite(store, tiles, slot); });
    const auto begin = Clock::now();
    store.commit(1);
    machine.commit_latency = slowest_ranks(seconds_since(begin));
    // A drive is slower at both together than at one after the other, and a step does both.
    machine.read = bytes / reading;
    machine.write = bytes / std::max(1e-9, both - reading);
  }

  // Returns a quarter of a rank's share of the free space, because records have two places.
  std::size_t quarter_of_free_space() const {
    std::uintmax_t bytes = 0;
    for (const std::filesystem::path& directory : options_.drives.directories) {
      bytes += std::filesystem::space(directory).available;
    }
    return static_cast<std::size_t>(bytes / 4 / world_.size());
  }

  // Rewrites all tiles as the engine does: it reads into half of the slots while it writes the others.
  template <class Slot>
  static void rewrite(offload::RecordStore& store, std::size_t tiles, const Slot& slot) {
    std::vector<offload::PendingRead> reads(slots);
    std::vector<offload::Completion> written(slots);
    for (std::size_t tile = 0; tile < tiles + slots / 2; ++tile) {
      if (tile < tiles) {
        written[tile % slots].wait();
        reads[tile % slots] = store.read(tile, slot(tile));
      }
      if (tile < slots / 2) continue;
      const std::size_t ready = tile - slots / 2;
      reads[ready % slots].payload();
      written[ready % slots] = store.write(ready, slot(ready));
    }
    for (const offload::Completion& completion : written)
      completion.wait();
  }

  // If ranks share memory, the engine keeps exchanged bytes there.
  std::byte* exchanged(std::size_t bytes) { return grown(exchanged_, bytes, world_.shared_memory()); }
  std::byte* own(std::size_t bytes) { return grown(buffer_, bytes, nullptr); }

  std::byte* grown(ballast::Buffer& buffer, std::size_t bytes, Allocator* allocator) {
    if (buffer.bytes() < bytes) {
      buffer = {};  // old and new memory together may not fit
      buffer = allocate(accounts_, {.bytes = bytes, .owner = "the rates", .allocator = allocator});
    }
    return buffer.data();
  }

  Communicator& world_;
  const TrainingOptions& options_;
  std::size_t elements_;  // of the unit that is measured
  CompiledPlan plan_;
  MemoryAccounts accounts_;
  ballast::Buffer buffer_;
  ballast::Buffer exchanged_;
};

constexpr std::size_t least_drive_bytes = std::size_t{256} << 20;
constexpr std::size_t most_drive_bytes = std::size_t{2} << 30;

// Measures a Llama of one layer, on this rank alone and without optimizer state: this needs little memory, and has the same
// arithmetic.
std::vector<UnitWork> work_of_one_layer(const RunOptions& options, Communicator& world, llama::Maths& maths) {
  llama::Config config = options.model;
  config.layers = 1;
  const llama::Architecture architecture(config);
  const auto alone = world.split(world.rank());
  const optim::Rule resting = optim::Sgd{.lr = 0.0};
  Training training(
      architecture.model, *alone, {resting, resting},
      {.stage = 0, .trace = llama::trace_of(config), .keeps_timeline = true, .threads = options.training.threads});
  llama::Batch batch = options.batch;
  batch.together = 1;
  llama::Llama model(config, batch, maths);
  training.start(llama::initial_values(architecture.model, 1));
  world.barrier();  // the ranks compute at the same time, as in the training
  model.run(training, std::vector<std::uint32_t>(batch.sequences * (batch.context + 1)));
  std::vector<UnitWork> work = training.unit_work();
  training.step();
  return work;
}

std::vector<UnitWork> work_of_units(const RunOptions& options, Communicator& world, llama::Maths& maths) {
  work_of_one_layer(options, world, maths);  // the first one warms up
  const std::vector<UnitWork> measured = work_of_one_layer(options, world, maths);
  std::vector<UnitWork> work(options.model.layers + 2, measured[1]);
  work.front() = measured.front();
  work.back() = measured.back();
  return work;
}

}  // namespace

double forecast(const RunOptions& options, const Plan& plan, Communicator& world, llama::Maths& maths) {
  require(!options.training.gpu, Code::unsupported,
          [] { return Problem{.what = "cannot forecast a training on a GPU", .needed = "a training on CPUs"}; });
  const CompiledPlan& compiled = ballast::compiled(plan);
  const UnitLayout& block = compiled.layout().units[1];
  // Many drives are fast for some seconds only, so a step that moves more is measured longer.
  const std::size_t on_drives = compiled.tiles_on_drive() * compiled.blocks().records().record;
  const std::size_t drive_bytes = on_drives == 0 ? 0 : std::clamp(on_drives / 8, least_drive_bytes, most_drive_bytes);
  const Machine machine = MachineRates(world, options.training, block).measure(drive_bytes);
  const std::vector<UnitWork> work = work_of_units(options, world, maths);
  return simulate({compiled.program(), plan.placement(), machine, work, options.waits_for_updates}).seconds;
}

}  // namespace ballast::benchmarks
