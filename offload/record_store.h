// Tiles of bytes on one or several drives that survive a crash at any moment, and whose damage is always detected. Each
// tile has two places; a step writes the place that it did not read, and a small commit makes the whole generation
// current. Scratch files, which end with the process, have one place for each tile.
#pragma once

#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/runtime/host_pages.h"
#include "offload/chunk_file.h"
#include "offload/io_queue.h"
#include "offload/record_format.h"

namespace ballast::offload {

// A mark next to a record file: a read of it has failed, so the next start looks for another copy.
bool is_marked_damaged(const std::filesystem::path& records);
void mark_damaged(const std::filesystem::path& records) noexcept;  // the drive may refuse: nothing depends on the mark
void remove_damage_mark(const std::filesystem::path& records) noexcept;

// A directory, and the queue of its drive. The queue outlives the store.
struct Drive {
  std::filesystem::path directory;
  IoQueue* queue = nullptr;
};

struct StoreOptions {
  std::string name = "state";  // the name of the files: NAME.records in each directory
  FileOptions file{};
  Log* log = nullptr;  // outlives the store

  std::filesystem::path path_in(const std::filesystem::path& directory) const {
    return directory / (name + ".records");
  }
};

// The content of the first file's identity and commit slots, before any record is checked.
struct FoundRecords {
  RecordShape shape{};
  struct Found {
    CommitPoint point{};
    std::uint64_t step = 0;
    CommitLabel label{};
  };
  std::vector<Found> commits{};  // commits with a valid seal: two at most, the newest first
};

// The read of a record that is in flight. Its store and memory outlive it.
class PendingRead {
 public:
  const Completion& completion() const { return completion_; }

  // Waits, and checks the record while it is in the caches of the calling thread. Throws B3202 with file, tile and
  // damage, and marks a file that is kept.
  void check() const;
  std::span<std::byte> payload() const;  // calls check() first

 private:
  friend class RecordStore;

  Completion completion_;
  KnownRecord known_;
  std::span<std::byte> record_;
  const File* file_ = nullptr;
  bool is_kept_ = false;
  Log* log_ = nullptr;
};

// Threads: one thread at a time writes and commits; any thread may read meanwhile. Memory for records is aligned to
// block_bytes, and belongs to the store until the read or write ends.
class RecordStore {
 public:
  // Creates the files with zero payloads, as generation 1 of step 0. It refuses to overwrite existing files, and leaves
  // none if it fails. Throws B2202 before it writes anything if the drives have too little space.
  static RecordStore create(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options = {});

  // Keeps records in nameless files, which the kernel removes with the process: nothing has to survive it. A write
  // overwrites the last record of its tile, and a commit writes nothing.
  static RecordStore scratch(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options = {});

  // Reads what open() would find, and changes nothing. Returns nothing if there is no file. Throws as read_identity()
  // and check_name() do.
  static std::optional<FoundRecords> look(std::span<const Drive> drives, const StoreOptions& options = {});

  // Opens the newest generation with all its records. The next commit overwrites a newer incomplete one.
  static RecordStore open(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options = {});

  RecordStore(RecordStore&&) noexcept;
  RecordStore& operator=(RecordStore&&) = delete;
  ~RecordStore();  // waits for the requests in flight

  std::size_t record_bytes() const { return places_.record_bytes(); }  // memory that a record needs
  std::size_t first_record_bytes() const { return places_.first_record_bytes(); }
  const RecordShape& shape() const { return shape_; }

  // What the last commit says.
  std::uint64_t generation() const { return last_.generation; }
  std::uint64_t step() const { return last_.step; }
  CommitPoint point() const { return last_.point; }
  std::span<const std::byte> note() const { return last_.note; }
  const CommitLabel& label() const { return last_.label; }

  // Starts to read the newest written record of a tile, committed or not: wait for the tile's write first. To read only
  // the first region, first_record_bytes() of memory suffice.
  PendingRead read(std::size_t tile, std::span<std::byte> record) const;
  PendingRead read_first(std::size_t tile, std::span<std::byte> record) const;

  // The newest written record of a tile as a chunk, in the file of the drive with this number.
  ChunkPlace place_of(std::size_t tile) const;
  const File& file_of(const ChunkPlace& place) const { return stripes_.at(place.file)->file; }

  // The payload's part of a record in memory, which the caller fills before write().
  std::span<std::byte> payload(std::span<std::byte> record) const { return payload_of(shape_, record); }

  // Starts to write a tile of the next generation. The calling thread computes the seal. A failed write may be
  // repeated.
  Completion write(std::size_t tile, std::span<std::byte> record);

  // Makes the next generation the current one, after all tiles are written. It is durable when this returns. note()
  // returns `note`, and label() `label`.
  void commit(std::uint64_t step, std::span<const std::byte> note = {}, const CommitLabel& label = {});

  // Waits for all reads and writes in flight, and ignores their failures: their memory can be freed afterwards. No other
  // call starts a read or a write meanwhile.
  void finish();

  // Discards all writes of the next generation, or in scratch files keeps them in it. They have ended when this returns.
  void abandon();

  // Makes the generation of this commit the current one; call it before any write. Returns false and changes nothing if
  // its records are incomplete.
  bool go_to(CommitPoint point);

  // Sets the point from which commits are counted: the next commit has its incarnation, and its number + 1.
  void count_from(CommitPoint point) { counted_from_ = point; }

 private:
  RecordStore(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options);

  struct Stripe {
    File file;
    IoQueue* queue;
  };

  void add(File file, IoQueue& queue);
  bool is_scratch() const { return shape_.places == 1; }
  void fill_with_zeros();
  void make_durable(const Commit& commit);
  void find_generation();
  void set_current(const Commit& commit);
  bool load(const Commit& commit);
  void log_unusable(const Commit& commit, std::string_view reason) const;
  PendingRead start_read(std::size_t tile, std::span<std::byte> record, std::size_t bytes) const;
  void write_commit_record(const Commit& commit);
  void warn_of_removed_files() const;
  void flush();
  void settle_writes() const;
  void check(std::size_t tile, std::span<std::byte> record, std::size_t bytes) const;
  void require_known_state() const;
  void wait(const Completion& completion, std::string_view what) const;
  std::span<std::byte> control() const { return {control_.get(), commit_bytes}; }

  RecordShape shape_;
  RecordPlaces places_;
  bool is_kept_;  // the files are kept and written, so that a read that fails leaves a mark
  Log* log_;
  HostPages control_;                             // memory for identities and commit records
  std::vector<std::unique_ptr<Stripe>> stripes_;  // pointers: the kernel and the queues know the stripes' addresses
  CommitPoint counted_from_{};
  Commit last_{};
  // Guards last_.generation and the members below. All but reads_ determine a tile's newest record.
  std::unique_ptr<std::mutex> newest_ = std::make_unique<std::mutex>();
  std::vector<Seals> current_;  // the seals of each tile
  std::vector<Seals> next_;
  struct Written {
    bool started = false;
    Completion completion{};
  };
  std::vector<Written> written_;
  mutable std::deque<Completion> reads_;  // reads in flight, and some that have ended
  bool commit_failed_ = false;
};

}  // namespace ballast::offload
