// Files of chunks: written once, from the beginning to the end, and read in an order that is known before. Where each chunk
// lies, and its seal, is kept by whoever had it written.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/runtime/host_pages.h"
#include "offload/io_queue.h"

namespace ballast::offload {

inline constexpr std::size_t chunk_alignment = 64;  // chunks begin at multiples of it, in the file and in memory

struct Chunk {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t seal = 0;  // XXH3-64
};

// Used by one thread. The queue outlives it.
class ChunkWriter {
 public:
  struct Memory {
    std::size_t buffers = 4;
    std::size_t buffer_bytes = std::size_t{4} << 20;  // whole blocks
  };

  // Makes a new file.
  ChunkWriter(const std::filesystem::path& path, IoQueue& queue, const Memory& memory);
  ChunkWriter(const std::filesystem::path& path, IoQueue& queue) : ChunkWriter(path, queue, Memory{}) {}
  ChunkWriter(ChunkWriter&&) = delete;
  ~ChunkWriter();

  // The bytes are the caller's again when this returns.
  Chunk append(std::span<const std::byte> bytes);

  // Everything is on the drive when this returns the file's size, which is of whole blocks.
  std::uint64_t finish();

 private:
  void copy(std::span<const std::byte> bytes);
  void write_buffer();
  std::span<std::byte> buffer(std::size_t number) const {
    return {pages_.get() + number * memory_.buffer_bytes, memory_.buffer_bytes};
  }

  Memory memory_;
  HostPages pages_;
  File file_;
  IoQueue& queue_;
  std::vector<Completion> written_;  // by buffer
  std::size_t now_ = 0;              // buffer
  std::size_t filled_ = 0;           // bytes of it
  std::uint64_t begin_ = 0;          // of that buffer in the file
};

// A chunk of one of several files.
struct ChunkPlace {
  std::size_t file = 0;
  Chunk chunk{};
};

// Used by one thread. The queue outlives it.
class ChunkReader {
 public:
  // Opens the files, and refuses (B3202) one that ends before its chunks do. Reads run ahead, in this memory or in that of two
  // chunks.
  ChunkReader(const std::vector<std::filesystem::path>& files, std::vector<ChunkPlace> in_order, IoQueue& queue,
              std::size_t memory_bytes = std::size_t{32} << 20);
  ChunkReader(ChunkReader&&) = delete;
  ~ChunkReader();

  // The next chunk, which stays until the one after it is asked for. B3202 names the file and the bytes of one that is not what
  // was written; the next can be read all the same.
  std::span<const std::byte> next();

 private:
  void require_whole() const;
  void read_ahead();
  std::span<std::byte> slot(std::size_t number) const;

  std::vector<ChunkPlace> in_order_;
  std::vector<std::unique_ptr<File>> files_;  // the kernel and the queue know them by their address
  IoQueue& queue_;
  std::size_t slots_;
  std::size_t slot_bytes_;
  HostPages pages_;
  std::vector<Completion> read_;  // by slot
  std::size_t begun_ = 0;         // chunks
  std::size_t given_ = 0;
};

}  // namespace ballast::offload
