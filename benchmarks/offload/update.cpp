#include "benchmarks/offload/update.h"

#include <ballast/optim.h>

#include <fmt/format.h>

#include <deque>

#include "kernels/random_math.h"
#include "kernels/runtime/sizes.h"
#include "optim/step.h"

namespace ballast::benchmarks {
namespace {

using offload::IoKind;

constexpr auto format = StateFormat::split;
constexpr const char* names[] = {"ballast-benchmark-first", "ballast-benchmark-second"};

offload::RecordShape shape_of(std::size_t tiles, std::size_t parameter_bytes, std::size_t state_bytes) {
  return {.run_id = 1, .tiles = tiles, .payload_bytes = parameter_bytes + state_bytes, .first_bytes = parameter_bytes};
}

}  // namespace

TensorFiles::TensorFiles(std::filesystem::path folder, std::size_t tiles, std::size_t tile_bytes)
    : folder_(std::move(folder)), tiles_(tiles), tile_bytes_(tile_bytes) {
  std::filesystem::create_directories(folder_);
}

TensorFiles::~TensorFiles() {
  std::error_code stays;
  std::filesystem::remove_all(folder_, stays);
}

std::string TensorFiles::options() const {
  return fmt::format("--folder {} --tiles {} --tile-bytes {}", folder_.string(), tiles_, tile_bytes_);
}

std::filesystem::path TensorFiles::path(std::size_t tile, std::size_t tensor) const {
  return folder_ / fmt::format("tile-{}-{}", tile, tensor);
}

void TensorFiles::create() const {
  for (std::size_t tile = 0; tile < tiles_; ++tile) {
    for (std::size_t tensor = 0; tensor < tensors_of_tile; ++tensor) {
      offload::File(path(tile, tensor), {.create = true});
    }
  }
}

void TensorFiles::move(offload::IoKind kind, std::size_t tile, std::span<std::byte> memory,
                       offload::IoQueue& queue) const {
  const std::size_t bytes = tile_bytes_ / tensors_of_tile / offload::block_bytes * offload::block_bytes;
  std::vector<offload::File> files;
  files.reserve(tensors_of_tile);
  offload::InFlight under_way;
  for (std::size_t tensor = 0; tensor < tensors_of_tile; ++tensor) {
    const auto& file = files.emplace_back(path(tile, tensor));
    under_way.add(queue.submit({kind, &file, 0, memory.subspan(tensor * bytes, bytes)}));
  }
  under_way.wait();
}

OffloadedUpdate::OffloadedUpdate(const UpdateSetting& setting)
    : setting_(setting),
      layout_({.format = format, .parameter = DType::bf16, .names = optim::AdamW::state}, setting.elements_of_tile),
      parameter_bytes_(round_up(2 * setting.elements_of_tile, 64)),
      tiles_(setting.state_bytes / (parameter_bytes_ + layout_.bytes())),
      queue_(offload::open_queue({.depth = setting.depth})),
      drive_{setting.directory, queue_.get()},
      store_(make_two_and_open_one()),
      plain_(file_of(names[setting.ours_is_second ? 0 : 1])),
      memory_(allocate(
          accounts_,
          {.kind = MemoryKind::pinned, .bytes = (setting.depth + 2) * store_.record_bytes(), .owner = "staging"})),
      gradients_(tiles_ * 2 * setting.elements_of_tile),
      backend_(kernels::cpu_backend({.threads = 1})),  // one is enough for a drive; another core serves the ring
      tensors_(setting.directory / "ballast-benchmark-tensors", tiles_, store_.record_bytes()) {
  queue_->remember(plain_);
  queue_->remember({memory_.data(), memory_.bytes()});
  if (!setting.tensor_files) return;
  tensors_.create();
  for (std::size_t tile = 0; tile < tiles_; ++tile) {
    tensors_.move(IoKind::write, tile, slot(0), *queue_);
  }
}

OffloadedUpdate::~OffloadedUpdate() {
  queue_->forget({memory_.data(), memory_.bytes()});
  for (const char* name : names) {
    std::error_code gone_already;
    std::filesystem::remove(file_of(name), gone_already);
  }
}

std::span<std::byte> OffloadedUpdate::slot(std::size_t number) const {
  return {memory_.data() + number * store_.record_bytes(), store_.record_bytes()};
}

std::filesystem::path OffloadedUpdate::file_of(const char* name) const {
  return setting_.directory / fmt::format("{}.records", name);
}

offload::RecordStore OffloadedUpdate::make_two_and_open_one() const {
  const auto shape = shape_of(tiles_, parameter_bytes_, layout_.bytes());
  for (const char* name : names) {
    offload::RecordStore::create(shape, {&drive_, 1}, {.name = name});
  }
  return offload::RecordStore::open(shape, {&drive_, 1}, {.name = names[setting_.ours_is_second ? 1 : 0]});
}

double OffloadedUpdate::gigabytes() const { return 2.0 * static_cast<double>(tiles_ * store_.record_bytes()) / 1e9; }

void OffloadedUpdate::update(std::size_t tile, std::span<std::byte> payload) {
  TileMemory state = layout_.tile(payload.data() + parameter_bytes_);
  state.parameter = payload.data();
  state.gradient = gradients_.data() + tile * 2 * setting_.elements_of_tile;
  state.gradient_dtype = DType::bf16;
  state.count = setting_.elements_of_tile;
  state.first_index = tile * setting_.elements_of_tile;
  state.rounding_stream = kernels::rounding_stream(0, 0, steps_);
  const kernels::Run run{.begin = 0, .count = state.count, .group = 0};
  const kernels::GroupStep group = optim::at(optim::AdamW{}, {.number = steps_});
  backend_->update(state, {&run, 1}, {&group, 1});
}

// Runs on one thread. Half of the slots are being read into, the others are updated or written.
void OffloadedUpdate::run(const Mode& mode) {
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
  for (std::size_t number = setting_.depth + 2; number > 0; --number) {
    free.push_back(slot(number - 1));
  }
  const std::size_t ahead = setting_.depth / 2;
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

void OffloadedUpdate::pipeline() {
  run({.read = [&](std::size_t tile, std::span<std::byte> slot) -> Payload {
         return [read = store_.read(tile, slot)] { return read.payload(); };
       },
       .write = [&](std::size_t tile, std::span<std::byte> slot) { return store_.write(tile, slot); }});
  store_.commit(steps_);
}

std::uint64_t OffloadedUpdate::place(std::size_t tile, bool other) const {
  return offload::RecordPlaces(store_.shape(), 1).offset_of(tile, other ? 1 : 0);
}

OffloadedUpdate::Mode OffloadedUpdate::unchecked(bool updates) {
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

void OffloadedUpdate::flush() { queue_->submit({IoKind::flush, &plain_, 0, {}}).wait(); }

void OffloadedUpdate::without_seals() {
  run(unchecked(true));
  flush();
  const std::uint64_t offset = offload::RecordPlaces::commit_offset(steps_);
  queue_->submit({IoKind::write, &plain_, offset, slot(0).first(offload::commit_bytes)}).wait();
  flush();
}

void OffloadedUpdate::drive_alone() {
  run(unchecked(false));
  flush();
}

void OffloadedUpdate::drained() {
  ++steps_;
  const std::span<std::byte> memory = slot(0);
  for (std::size_t tile = 0; tile < tiles_; ++tile) {
    tensors_.move(IoKind::read, tile, memory, *queue_);
    update(tile, store_.payload(memory));
    tensors_.move(IoKind::write, tile, memory, *queue_);
  }
}

}  // namespace ballast::benchmarks
