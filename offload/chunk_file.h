// Files of chunks, for checkpoints: written once from beginning to end, and read in an order that is known in advance.
// The caller keeps the location and the seal of each chunk. Records of record files are read as chunks, too.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/runtime/host_pages.h"
#include "offload/io_queue.h"
#include "offload/record_format.h"

namespace ballast::offload {

inline constexpr std::size_t chunk_alignment = 64;  // alignment of chunks in the file and in memory

struct Chunk {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t seal = 0;  // XXH3-64
};

// A chunk of one of several files.
struct ChunkPlace {
  std::size_t file = 0;
  Chunk chunk{};
  std::optional<KnownRecord> record{};  // none: the chunk's own seal counts
};

// A record in a file that stays open while this is used. Its payload is laid out for so many elements.
struct OpenRecord {
  const File& file;
  ChunkPlace place{};
  std::size_t elements = 0;
};

// Used by one thread. The queue outlives the writer.
class ChunkWriter {
 public:
  struct Memory {
    std::size_t buffers = 4;
    std::size_t buffer_bytes = std::size_t{4} << 20;  // a multiple of block_bytes
  };

  // Creates the file; an existing one is an error.
  ChunkWriter(const std::filesystem::path& path, IoQueue& queue, const Memory& memory);
  ChunkWriter(const std::filesystem::path& path, IoQueue& queue) : ChunkWriter(path, queue, Memory{}) {}
  ChunkWriter(ChunkWriter&&) = delete;
  ~ChunkWriter();

  // Appends a chunk. The caller may change the bytes when this returns.
  Chunk append(std::span<const std::byte> bytes);

  // Appends a record as it is on its drive, without reading it: both files share its blocks until one of them changes. Returns
  // nothing where their file system cannot do that.
  std::optional<ChunkPlace> clone(const OpenRecord& record);

  // Flushes and returns the file's size, a multiple of block_bytes. All chunks are on the drive then.
  std::uint64_t finish();

 private:
  void copy(std::span<const std::byte> bytes);
  void write_buffer();
  void write_blocks();
  std::span<std::byte> buffer(std::size_t number) const {
    return {pages_.get() + number * memory_.buffer_bytes, memory_.buffer_bytes};
  }

  Memory memory_;
  HostPages pages_;
  File file_;
  IoQueue& queue_;
  std::vector<Completion> written_;  // the last write of each buffer
  std::size_t now_ = 0;              // the buffer that is being filled
  std::size_t filled_ = 0;           // bytes of that buffer
  std::uint64_t begin_ = 0;          // offset of that buffer in the file
};

// Used by one thread. The queue outlives the reader.
class ChunkReader {
 public:
  // Opens the files that have chunks to read; throws B3202 for one that is too short for them. Reads ahead into `memory_bytes`, or into
  // the memory of two chunks if that is more.
  ChunkReader(const std::vector<std::filesystem::path>& files, std::vector<ChunkPlace> in_order, IoQueue& queue,
              std::size_t memory_bytes = std::size_t{32} << 20);
  ChunkReader(ChunkReader&&) = delete;
  ~ChunkReader();

  // Returns the next chunk, or a record's payload, which stays valid until the next call. Throws B3202 with the file and
  // the bytes, or the tile, if it is damaged; the chunk after it can still be read.
  std::span<const std::byte> next();

 private:
  void require_whole() const;
  void read_ahead();
  std::span<std::byte> slot(std::size_t number) const;

  std::vector<ChunkPlace> in_order_;
  std::vector<std::unique_ptr<File>> files_;  // pointers: the kernel and the queue know the files' addresses
  IoQueue& queue_;
  std::size_t slots_;
  std::size_t slot_bytes_;
  HostPages pages_;
  std::vector<Completion> read_;  // the read of each slot
  std::size_t begun_ = 0;         // chunks whose read has begun
  std::size_t given_ = 0;
};

}  // namespace ballast::offload
