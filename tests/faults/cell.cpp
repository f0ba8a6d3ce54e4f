// Trains on three ranks, of which one has a fault in one phase:
//   fault_cell TRANSPORT PHASE FAULT VICTIM FOLDER
// The environment says where ranks as processes meet.
// Rank N writes its number of the process to FOLDER/N.pid, and to FOLDER/N.err its error, if any, or what it has trained. The
// exit statuses of all ranks are printed. FOLDER/N.planted is there once rank N has its fault. A run in FOLDER/records resumes.
#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "offload/checksum.h"
#include "tests/faults/planted.h"
#include "tests/plan/plan_rig.h"
#include "tests/zero/synthetic.h"
#include "zero/comm/thread_communicator.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t size = 3;
constexpr std::uint64_t all_steps = 4;
constexpr std::uint64_t faulty_step = 2;

struct Cell {
  std::string transport, phase, fault;
  std::size_t victim;
  std::filesystem::path folder;

  std::chrono::seconds timeout() const { return std::chrono::seconds(fault == "none" ? 60 : 3); }
  std::ofstream file(std::size_t rank, const char* kind) const {
    return std::ofstream(folder / fmt::format("{}.{}", rank, kind));
  }
};

// The faults of one rank.
class Faults {
 public:
  Faults(const Cell& cell, std::size_t rank) : cell_(cell), is_victim_(rank == cell.victim) {}

  void come_to(std::string_view phase) {
    if (!is_victim_ || phase != cell_.phase) return;
    is_victim_ = false;
    if (cell_.fault == "none") return;
    cell_.file(cell_.victim, "planted") << phase;
    if (cell_.fault == "exception") throw std::runtime_error("planted");
    if (cell_.fault == "sys.exit") std::exit(3);
    plant(cell_.fault);
  }

 private:
  const Cell& cell_;
  bool is_victim_;
};

TrainingOptions options_of(const Cell& cell, const Stream* stream) {
  return {.stage = 3,
          .parameters = Tier::nvme,
          .gradients = Tier::device,
          .state = Tier::nvme,
          .drives = {.directories = {cell.folder / "records"}, .run = "cell", .depth = 4},
          .tile_elements = 256,
          .threads = 1,
          .gpu = stream != nullptr ? std::optional(stream->gpu()) : std::nullopt,
          .stream = stream != nullptr ? stream->handle() : nullptr};
}

void train_step(Training& training, const Model& model, const SyntheticTrainer& trainer, Faults& faults) {
  const bool is_faulty = training.steps() == faulty_step;
  Trace forward, backward;
  for (const Visit& use : plain_order(model)) {
    (use.phase == Phase::forward ? forward : backward).push_back(use);
  }
  SyntheticTrainer own = trainer;
  own.run(training, {forward.front()}, training.steps());
  if (is_faulty) faults.come_to("forward");
  forward.erase(forward.begin());
  own.run(training, forward, training.steps());
  own.run(training, {backward.front()}, training.steps());
  if (is_faulty) faults.come_to("backward");
  backward.erase(backward.begin());
  own.run(training, backward, training.steps());
  if (is_faulty) faults.come_to("step");
  training.step();
  if (is_faulty) faults.come_to("commit");
}

// Returns what the rank has trained.
std::string train(const Cell& cell, Communicator& world, Faults& faults) {
  std::optional<Stream> own_stream;
  if (cell.transport == "nccl") own_stream.emplace(static_cast<int>(world.rank()));
  const Stream* const stream = own_stream ? &*own_stream : nullptr;
  const Model model = odd_model(1);
  Training training(model, world, {optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01}}, options_of(cell, stream));
  training.start(initial_parameters());
  const std::uint64_t began_at = training.steps();
  const SyntheticTrainer trainer(model, world.rank(), stream);
  while (training.steps() < all_steps) {
    train_step(training, model, trainer, faults);
  }
  faults.come_to("close");
  training.finish();
  std::vector<std::byte> parameters;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    add_bytes(model.units[unit], training.forward(unit), stream, parameters);
  }
  return fmt::format("began after step {} and ended with {:x}\n", began_at, offload::checksum(parameters));
}

// Returns whether the rank has trained to the end. `meet` returns when all ranks of this process have begun.
bool run_rank(const Cell& cell, std::size_t rank, const std::function<void()>& meet,
              const std::function<std::string(Faults&)>& body) {
  std::ofstream log = cell.file(rank, "err");  // no limit is set yet
  meet();
  Faults faults(cell, rank);
  std::string said;
  bool is_done = false;
  try {
    faults.come_to("start");
    said = body(faults);
    is_done = true;
  } catch (const std::exception& failure) {
    said = failure.what();
  }
  log << said << std::endl;
  return is_done;
}

int run_threads(const Cell& cell) {
  ThreadGroup group(size, cell.timeout());
  std::vector<std::thread> threads;
  std::vector<int> statuses(size);
  std::latch begun(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    cell.file(rank, "pid") << ::getpid();
  }
  for (std::size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto meet = [&] { begun.arrive_and_wait(); };
      const bool is_done = run_rank(cell, rank, meet, [&](Faults& faults) {
        const auto backend = kernels::cpu_backend({.threads = 1});
        return train(cell, *thread_communicator(group, rank, *backend), faults);
      });
      statuses[rank] = is_done ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::cout << fmt::format("[{}]", fmt::join(statuses, ", ")) << std::endl;
  return 0;
}

int run_process(const Cell& cell, std::size_t rank) {
  const auto transport = cell.transport == "gloo" ? HostTransport::gloo : HostTransport::shared_memory;
  const auto body = [&](Faults& faults) {
    return train(cell, *connect({.timeout = cell.timeout(), .transport = transport, .threads = 1}), faults);
  };
  return run_rank(
             cell, rank, [] {}, body)
             ? 0
             : 1;
}

int run_processes(const Cell& cell) {
  std::vector<pid_t> children;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("RANK", std::to_string(rank).c_str(), 1);
      std::exit(run_process(cell, rank));
    }
    cell.file(rank, "pid") << child;
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    statuses.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  }
  std::cout << fmt::format("[{}]", fmt::join(statuses, ", ")) << std::endl;
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() != 5) {
    std::cerr << "usage: fault_cell TRANSPORT PHASE FAULT VICTIM FOLDER" << std::endl;
    return 2;
  }
  const Cell cell{words[0], words[1], words[2], std::stoul(words[3]), words[4]};
  plant("no ring");
  return cell.transport == "threads" ? run_threads(cell) : run_processes(cell);
}
