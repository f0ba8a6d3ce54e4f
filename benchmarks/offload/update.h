// The optimizer step of state on a drive: it reads a tile, applies AdamW, and writes the tile to its other place.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "offload/file.h"
#include "offload/io_queue.h"
#include "offload/record_store.h"
#include "optim/state_layout.h"

namespace ballast::benchmarks {

class OffloadedUpdate {
 public:
  // Makes files in an empty directory, and leaves them there. With `ours_is_second`, the library's path gets the second of the two files. With `tensor_files`, it makes the files that only
  // drained() uses.
  OffloadedUpdate(const std::string& directory, std::size_t state_bytes, std::size_t depth, bool ours_is_second,
                  bool tensor_files);
  OffloadedUpdate(OffloadedUpdate&&) = delete;
  ~OffloadedUpdate();

  double gigabytes() const;  // read and written by a run
  std::size_t tiles() const { return tiles_; }
  std::size_t tile_bytes() const { return store_.record_bytes(); }

  void pipeline();       // as the library does it: sealed records, and a commit at the end
  void without_seals();  // the same bytes, arithmetic and commit, without checks
  void drive_alone();    // the same bytes flushed once; no arithmetic, no commit

  // Waits as an optimizer does that swaps tensor by tensor: it opens and reads the files of a tile, waits, updates the
  // tile, writes the files, and waits.
  void drained();

 private:
  using Payload = std::function<std::span<std::byte>()>;  // it waits for a read
  struct Mode {
    std::function<Payload(std::size_t tile, std::span<std::byte> slot)> read;
    std::function<offload::Completion(std::size_t tile, std::span<std::byte> slot)> write;
    bool updates = true;
  };
  void run(const Mode& mode);
  Mode unchecked(bool updates);
  void update(std::size_t tile, std::span<std::byte> payload);
  std::filesystem::path file_of(const char* name) const;
  offload::RecordStore make_two_and_open_one(bool second) const;
  std::uint64_t place(std::size_t tile, bool other) const;
  void flush();
  std::span<std::byte> slot(std::size_t number) const;

  // Opens the files of a tile, with one for each of its four tensors, moves all of them to or from the first slot, and waits.
  void move_tensors(offload::IoKind kind, std::size_t tile, bool create = false);

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
