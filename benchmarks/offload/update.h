// The optimizer step of state on a drive: it reads a tile, applies AdamW, and writes the tile to its other place.
#pragma once

#include <ballast/optim.h>

#include <fmt/format.h>

#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "kernels/backend.h"
#include "kernels/random_math.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/sizes.h"
#include "offload/file.h"
#include "offload/io_queue.h"
#include "offload/record_store.h"
#include "optim/state_layout.h"
#include "optim/step.h"

namespace ballast::benchmarks {

class OffloadedUpdate {
 public:
  // Makes two files in an empty directory, and leaves them there. With `ours_is_second`, the library's path gets the second one.
  OffloadedUpdate(const std::string& directory, std::size_t state_bytes, std::size_t depth, bool ours_is_second)
      : directory_(directory),
        depth_(depth),
        layout_({.format = format, .parameter = DType::bf16, .names = optim::AdamW::state}, elements_of_tile),
        parameter_bytes_(round_up(2 * elements_of_tile, 64)),
        tiles_(state_bytes / (parameter_bytes_ + layout_.bytes())),
        queue_(offload::open_queue({.depth = depth})),
        drive_{directory, queue_.get()},
        store_(make_two_and_open_one(ours_is_second)),
        plain_(file_of(names[ours_is_second ? 0 : 1])),
        memory_(allocate(
            accounts_, {.kind = MemoryKind::pinned, .bytes = (depth + 2) * store_.record_bytes(), .owner = "staging"})),
        gradients_(tiles_ * 2 * elements_of_tile),
        backend_(kernels::cpu_backend({.threads = 1})) {  // one is enough for a drive; another core serves the ring
    queue_->remember(plain_);
    queue_->remember({memory_.data(), memory_.bytes()});
  }
  OffloadedUpdate(OffloadedUpdate&&) = delete;
  ~OffloadedUpdate() { queue_->forget({memory_.data(), memory_.bytes()}); }

  // Read and written by a run.
  double gigabytes() const { return 2.0 * static_cast<double>(tiles_ * store_.record_bytes()) / 1e9; }
  std::size_t tiles() const { return tiles_; }
  std::size_t tile_bytes() const { return store_.record_bytes(); }

  // The update seals records and commits at its end, as one of the library does.
  void pipeline() {
    run({.read = [&](std::size_t tile, std::span<std::byte> slot) -> Payload {
           return [read = store_.read(tile, slot)] { return read.payload(); };
         },
         .write = [&](std::size_t tile, std::span<std::byte> slot) { return store_.write(tile, slot); }});
    store_.commit(steps_);
  }

  // The same bytes, arithmetic and commit, without checks.
  void without_seals() {
    run(unchecked(true));
    flush();
    const std::uint64_t offset = offload::RecordPlaces::commit_offset(steps_);
    queue_->submit({IoKind::write, &plain_, offset, slot(0).first(offload::commit_bytes)}).wait();
    flush();
  }

  // The same bytes flushed once; no arithmetic, no commit.
  void drive_alone() {
    run(unchecked(false));
    flush();
  }

 private:
  using IoKind = offload::IoKind;
  static constexpr auto format = StateFormat::split;
  static constexpr std::size_t elements_of_tile = 128 * 1024;
  static constexpr const char* names[] = {"ballast-benchmark-first", "ballast-benchmark-second"};

  using Payload = std::function<std::span<std::byte>()>;  // it waits for a read
  struct Mode {
    std::function<Payload(std::size_t tile, std::span<std::byte> slot)> read;
    std::function<offload::Completion(std::size_t tile, std::span<std::byte> slot)> write;
    bool updates = true;
  };

  // Runs on one thread. Half of the slots are being read into, the others are updated or written.
  void run(const Mode& mode) {
    struct Reading {
      std::span<std::byte> slot;
      Payload payload;
    };
    struct Writing {
      offload::Completion done;
      std::span<std::byte> slot;
    };
    ++steps_;
    std::deque<Reading> reading;
    std::deque<Writing> writing;
    std::vector<std::span<std::byte>> free;
    for (std::size_t number = depth_ + 2; number > 0; --number) {
      free.push_back(slot(number - 1));
    }
    const std::size_t ahead = depth_ / 2;
    std::size_t next = 0;
    for (std::size_t tile = 0; tile < tiles_; ++tile) {
      for (; next < tiles_ && next < tile + ahead; ++next) {
        if (free.empty()) {
          writing.front().done.wait();
          free.push_back(writing.front().slot);
          writing.pop_front();
        }
        const std::span<std::byte> into = free.back();
        free.pop_back();
        reading.push_back({into, mode.read(next, into)});
      }
      Reading& current = reading.front();
      const auto payload = current.payload();
      if (mode.updates) update(tile, payload);
      writing.push_back({mode.write(tile, current.slot), current.slot});
      reading.pop_front();
    }
    for (const Writing& last : writing) {
      last.done.wait();
    }
  }

  Mode unchecked(bool updates) {
    other_ = !other_;
    const std::size_t bytes = store_.record_bytes();
    return {.read = [=, this](std::size_t tile, std::span<std::byte> slot) -> Payload {
              const auto record = slot.first(bytes);
              const auto done = queue_->submit({IoKind::read, &plain_, place(tile, !other_), record});
              return [=, this] {
                done.wait();
                return store_.payload(record);
              };
            },
            .write =
                [=, this](std::size_t tile, std::span<std::byte> slot) {
                  return queue_->submit({IoKind::write, &plain_, place(tile, other_), slot.first(bytes)});
                },
            .updates = updates};
  }

  void update(std::size_t tile, std::span<std::byte> payload) {
    TileMemory state = layout_.tile(payload.data() + parameter_bytes_);
    state.parameter = payload.data();
    state.gradient = gradients_.data() + tile * 2 * elements_of_tile;
    state.gradient_dtype = DType::bf16;
    state.count = elements_of_tile;
    state.first_index = tile * elements_of_tile;
    state.rounding_stream = kernels::rounding_stream(0, 0, steps_);
    const kernels::Run run{.begin = 0, .count = state.count, .group = 0};
    const kernels::GroupStep group = optim::at(optim::AdamW{}, {.number = steps_});
    backend_->update(state, {&run, 1}, {&group, 1});
  }

  std::filesystem::path file_of(const char* name) const { return directory_ / fmt::format("{}.records", name); }

  offload::RecordStore make_two_and_open_one(bool second) const {
    const auto shape = offload::RecordShape{.run_id = 1,
                                            .tiles = tiles_,
                                            .payload_bytes = parameter_bytes_ + layout_.bytes(),
                                            .first_bytes = parameter_bytes_};
    for (const char* name : names) {
      offload::RecordStore::create(shape, {&drive_, 1}, {.name = name});
    }
    return offload::RecordStore::open(shape, {&drive_, 1}, {.name = names[second ? 1 : 0]});
  }

  std::uint64_t place(std::size_t tile, bool other) const {
    return offload::RecordPlaces(store_.shape(), 1).offset_of(tile, other ? 1 : 0);
  }

  void flush() { queue_->submit({IoKind::flush, &plain_, 0, {}}).wait(); }

  std::span<std::byte> slot(std::size_t number) const {
    return {memory_.data() + number * store_.record_bytes(), store_.record_bytes()};
  }

  std::filesystem::path directory_;
  std::size_t depth_;
  optim::StateLayout layout_;
  std::size_t parameter_bytes_;
  std::size_t tiles_;
  std::unique_ptr<offload::IoQueue> queue_;
  offload::Drive drive_;
  offload::RecordStore store_;
  offload::File plain_;  // the other file, for runs without records
  MemoryAccounts accounts_;
  ballast::Buffer memory_;  // pinned and known to the queue: slots of one record each
  Buffer gradients_;
  std::unique_ptr<kernels::Backend> backend_;
  std::uint64_t steps_ = 0;
  bool other_ = false;
};

}  // namespace ballast::benchmarks
