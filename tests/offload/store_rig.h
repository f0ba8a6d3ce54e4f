// A record store in the test's own directories, with payloads that depend on the step that wrote them.
#pragma once

#include "offload/record_store.h"
#include "tests/offload/aligned.h"
#include "tests/temporary_directory.h"

namespace ballast::offload {

class StoreRig {
 public:
  explicit StoreRig(std::size_t drives = 1) : directories_(drives) { use(open_queue({.depth = 4})); }

  RecordShape shape{.run_id = 0xb11a57, .tiles = 6, .payload_bytes = 9000, .first_bytes = 3000};

  void use(std::unique_ptr<IoQueue> queue) {
    queue_ = std::move(queue);
    drives_.clear();
    for (const TemporaryDirectory& directory : directories_) {
      drives_.push_back({directory.path(), queue_.get()});
    }
  }

  RecordStore create() { return RecordStore::create(shape, drives_, options()); }
  RecordStore open() { return RecordStore::open(shape, drives_, options()); }
  RecordStore scratch() { return RecordStore::scratch(shape, drives_, options()); }

  std::span<const Drive> drives() const { return drives_; }
  const std::filesystem::path& directory(std::size_t drive) const { return directories_[drive].path(); }
  std::filesystem::path file(std::size_t drive) const { return directory(drive) / "state.records"; }
  std::string log_text() const { return log_text_; }

  std::span<std::byte> record() const { return memory_.span(); }

  static std::vector<std::byte> note(std::uint64_t step) {
    std::vector<std::byte> bytes(200 + step);
    fill_pattern(bytes, step);
    return bytes;
  }

  void write_tiles(RecordStore& store, std::uint64_t step) const {
    for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
      fill_pattern(store.payload(record()), 1000 * step + tile);
      store.write(tile, record()).wait();
    }
  }

  void write_step(RecordStore& store, std::uint64_t step) const {
    write_tiles(store, step);
    store.commit(step, note(step));
  }

  // Returns whether every tile has the bytes that this step wrote.
  bool holds_step(const RecordStore& store, std::uint64_t step) const {
    return holds_tiles(store, step) && store.step() == step;
  }
  bool holds_tiles(const RecordStore& store, std::uint64_t step) const {
    for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
      if (!holds_pattern(store.read(tile, record()).payload(), 1000 * step + tile)) return false;
    }
    return true;
  }

 private:
  StoreOptions options() { return {.log = &log_}; }

  std::vector<TemporaryDirectory> directories_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<Drive> drives_;
  Aligned memory_{64 * 1024};
  std::string log_text_;  // without the warning of QEMU's files, which have no direct I/O
  Log log_{[this](Level, std::string_view line) {
    if (line.find("through the page cache") == std::string_view::npos) log_text_ += line;
  }};
};

}  // namespace ballast::offload
