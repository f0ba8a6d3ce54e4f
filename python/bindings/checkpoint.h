// Writes parts of a training's state to the files of a checkpoint, and reads them back.
#pragma once

#include <ballast/tensor_state.h>

#include <tuple>

#include "kernels/runtime/host_pages.h"
#include "offload/chunk_file.h"
#include "python/bindings/training_binding.h"

namespace ballast::python {

// The offset in the file, and the seal.
using Appended = std::pair<std::uint64_t, std::uint64_t>;

// Chunks in host memory, for a training that changes their sources before they are written. One thread appends all of them,
// then any thread may read them, and after release() the same chunks may be appended anew.
class Snapshot {
 public:
  // The bytes of each chunk. Throws B2001 if the host has too little memory.
  Snapshot(const std::vector<std::size_t>& sizes, int threads);

  // The next chunk, which has the next of the sizes.
  void append(const StatePart& part);
  void append_memory(std::uintptr_t address, std::size_t bytes);

  std::span<const std::byte> chunk(std::size_t number) const;

  // Forgets the chunks. The memory stays, for the next ones, until the kernel needs it.
  void release();

  bool has_sizes(const std::vector<std::size_t>& sizes) const { return sizes == sizes_; }
  std::size_t bytes() const { return begins_.back(); }

 private:
  std::span<std::byte> next(std::size_t bytes);

  std::vector<std::size_t> sizes_;
  std::vector<std::size_t> begins_;  // of each chunk, and the end of the last one
  HostPages pages_;
  std::size_t appended_ = 0;
  bool is_reused_ = false;
};

class CheckpointWriter {
 public:
  explicit CheckpointWriter(const std::string& path)
      : queue_(offload::open_queue({.log = &quiet_})), file_(path, *queue_) {}

  Appended append(const StatePart& part);
  Appended append_memory(std::uintptr_t address, std::size_t bytes);
  Appended append_chunk(const Snapshot& snapshot, std::size_t number);
  std::uint64_t finish();

 private:
  Appended append_bytes(std::span<const std::byte> bytes);

  Log quiet_{[](Level, std::string_view) {}};
  std::unique_ptr<offload::IoQueue> queue_;
  offload::ChunkWriter file_;
  std::vector<std::byte> chunk_;
};

class CheckpointReader {
 public:
  using Place = std::tuple<std::size_t, std::uint64_t, std::uint64_t, std::uint64_t>;  // file, offset, bytes, seal

  CheckpointReader(const std::vector<std::string>& files, const std::vector<Place>& in_order);

  void next();
  std::span<const std::byte> now() const { return now_; }  // the chunk that next() has read

  // `count` elements of a chunk of `in_chunk`, from `first` on. They become those of a part from `into` on.
  struct Elements {
    std::size_t in_chunk = 0;
    std::size_t first = 0;
    std::size_t into = 0;
    std::size_t count = 0;
  };
  void copy(const ChunkKind& kind, const Elements& elements, const StatePart& to) const;

 private:
  Log quiet_{[](Level, std::string_view) {}};
  std::unique_ptr<offload::IoQueue> queue_;
  std::optional<offload::ChunkReader> files_;
  std::span<const std::byte> now_;
};

}  // namespace ballast::python
