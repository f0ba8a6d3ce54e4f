// Bytes that a forward pass saves and its backward pass needs again, last saved first. They are kept in host memory, or
// on a drive with the last ones in a few buffers.
//
//     forward    save(): bytes -> a buffer -> the drive, written behind the forward pass
//     backward   load(): the drive -> a buffer -> bytes, read ahead of the backward pass
//
// The bytes are cut into pieces, which form a stack. Where a buffer is needed, the piece that was saved first leaves its
// buffer, because the backward pass needs it last. So the end of a forward pass is never read from the drive.
#pragma once

#include <ballast/log.h>
#include <ballast/memory.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"
#include "offload/completion.h"
#include "offload/file.h"
#include "offload/io_queue.h"

namespace ballast::offload {

// Host memory in buffers of one size, for bytes on their way between memory, a GPU and a drive.
struct PieceBuffer {
  std::span<std::byte> memory{};
  std::vector<Completion> uses{};  // transfers that may still read or write the memory

  bool is_idle() const;  // all uses have ended
};

struct ActivationOptions {
  std::filesystem::path directory{};                 // a directory on a drive; empty: host memory keeps everything
  std::size_t memory_bytes = std::size_t{64} << 20;  // bytes of buffers, if there is a drive
  std::size_t piece_bytes = std::size_t{1} << 20;    // a multiple of block_bytes
  std::optional<int> gpu{};                          // the GPU whose memory is saved and loaded; none: the host's
  Log* log = nullptr;                                // outlives the store

  std::size_t buffers() const;  // the most; with a drive two or more
};

// Memory is added in slabs, when it is needed; a GPU's copies use pinned memory. The destructor waits for the uses of all buffers.
// Used by one thread at a time.
class PieceBuffers {
 public:
  // The queue reads and writes the memory, if there is a drive. It and the options outlive this object.
  PieceBuffers(const ActivationOptions& options, IoQueue* queue) : options_(options), queue_(queue) {}
  PieceBuffers(PieceBuffers&&) = delete;
  ~PieceBuffers();

  // Takes a buffer that nothing uses. Returns null if there is none, and there may not be more.
  PieceBuffer* take();

  // Takes the buffer that was given back first, whose uses may not have ended. Returns null if none was given back.
  PieceBuffer* take_used();

  void give_back(PieceBuffer& buffer) { free_.push_back(&buffer); }

  std::size_t bytes() const { return buffers_.size() * options_.piece_bytes; }

 private:
  void add_slab();

  const ActivationOptions& options_;
  IoQueue* queue_;
  MemoryAccounts accounts_;
  std::vector<Buffer> slabs_;
  std::deque<PieceBuffer> buffers_;  // a deque keeps their addresses
  std::deque<PieceBuffer*> free_;
};

// Any thread may call. Calls wait for each other: one thread at a time moves bytes.
class ActivationStore {
 public:
  using Ticket = std::uint64_t;

  struct Saved {
    Ticket ticket = 0;
    Completion copied{};  // the caller keeps the bytes as they are until it ends
  };

  struct Counters {
    std::size_t saved_bytes = 0;    // the total of save()
    std::size_t loaded_bytes = 0;   // the total of load()
    std::size_t written_bytes = 0;  // all bytes written to the drive
    std::size_t read_bytes = 0;     // all bytes read from the drive
    std::size_t kept_bytes = 0;     // bytes held now
    std::size_t host_bytes = 0;     // bytes of buffers now
    std::size_t drive_bytes = 0;    // bytes of the file now
    double waited_seconds = 0;      // time in which callers waited for buffers and reads
  };

  // Opens a queue for the drive. Tests pass one of their own.
  explicit ActivationStore(const ActivationOptions& options) : ActivationStore(options, nullptr) {}
  ActivationStore(const ActivationOptions& options, std::unique_ptr<IoQueue> queue);
  ActivationStore(ActivationStore&&) = delete;

  // Takes a copy of the bytes. On a GPU the copy begins after all work that is in the stream now. Waits for the drive
  // while all buffers hold bytes that are not written yet. Throws B2202 if the drive is full, B3201 if it fails, B2001
  // if the host has too little memory; nothing of these bytes is kept then.
  Saved save(std::span<const std::byte> bytes, StreamHandle stream = nullptr);

  // Copies the saved bytes, and prefetches those that were saved before them. On the host it waits for the bytes; on a GPU the
  // copy begins after all work that is in the stream now, and the caller orders later work after the completion. May be
  // repeated. Throws B3202 if bytes differ from those that were saved.
  Completion load(Ticket ticket, std::span<std::byte> into, StreamHandle stream = nullptr);

  // Whether load() would find all bytes in host memory.
  bool is_in_memory(Ticket ticket) const;

  // Forgets what was saved: its memory and its space on the drive are free for the next bytes.
  void drop(Ticket ticket);

  Counters counters() const;

 private:
  using Order = std::uint64_t;  // the order in which pieces are saved

  struct Piece {
    std::size_t bytes = 0;
    PieceBuffer* buffer = nullptr;         // the buffer that holds the bytes when `entered` has ended
    std::optional<std::uint64_t> place{};  // the place on the drive, set when the write begins
    std::uint64_t seal = 0;                // the seal of the bytes, set when the write begins
    Completion entered{};
    Completion written{};
    bool was_read = false;  // the piece comes from the drive, and is not checked yet
  };
  struct Entry {
    std::size_t bytes = 0;
    std::size_t pieces = 0;
  };

  // A place of a piece in the file. It is used again after its last write has ended.
  struct FreePlace {
    std::uint64_t offset;
    Completion last_write;
  };

  void save_pieces(std::span<const std::byte> bytes);
  void enter(Piece& piece, const std::byte* from);
  Completion leave(Order order, std::byte* to);
  Completion leave_memory(Ticket ticket, std::span<std::byte> into);
  Completion keep_in_memory(Ticket ticket, std::span<const std::byte> bytes);
  void begin_writes();
  void begin_write(Order order, Piece& piece);
  std::uint64_t take_place();
  void begin_read(Order order, Piece& piece, PieceBuffer& buffer);
  void read_ahead(Order below);
  bool may_read_more();
  void check(Order order, Piece& piece);
  PieceBuffer& empty_buffer();
  PieceBuffer* empty_buffer_for(Order order);
  std::optional<Order> first_to_leave() const;
  void empty(Order order, Piece& piece);
  void release(Order order, Piece& piece);
  void forget(Ticket ticket, std::size_t pieces);
  void wait(const Completion& completion, std::string_view what);
  const Entry& entry_of(Ticket ticket) const;

  ActivationOptions options_;
  mutable std::mutex mutex_;
  Counters counters_{};
  std::optional<Stream> download_{};
  std::optional<Stream> upload_{};
  std::optional<File> file_{};  // nameless
  std::uint64_t file_bytes_ = 0;
  std::deque<FreePlace> free_places_;
  std::unique_ptr<IoQueue> queue_;  // destroyed after the buffers, which are registered with it, and before the file
  PieceBuffers buffers_;
  Order next_ = 0;
  std::map<Ticket, Entry> entries_;  // a ticket is the order of the first piece
  std::map<Order, Piece> pieces_;
  std::set<Order> held_;            // pieces in buffers, until they are loaded
  std::set<Order> used_;            // loaded pieces in buffers
  std::deque<Order> to_write_;      // pieces whose write has not begun
  std::deque<Completion> reading_;  // the oldest read first
};

}  // namespace ballast::offload
