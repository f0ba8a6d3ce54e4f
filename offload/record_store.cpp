#include "offload/record_store.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "kernels/runtime/sizes.h"
#include "offload/completion.h"
#include "offload/file.h"
#include "offload/preflight.h"

namespace ballast::offload {

namespace {

std::filesystem::path mark_of(const std::filesystem::path& records) { return records.string() + ".damaged"; }

constexpr std::size_t fill_depth = 8;  // tiles in flight while the files are filled

std::vector<std::filesystem::path> directories_of(std::span<const Drive> drives) {
  std::vector<std::filesystem::path> directories;
  for (const Drive& drive : drives) {
    directories.push_back(drive.directory);
  }
  return directories;
}

void remove_unfinished(std::span<const std::filesystem::path> paths) {
  for (const auto& path : paths) {
    std::error_code none_there;
    std::filesystem::remove(unfinished(path), none_there);
  }
}

// Reads the first block into the beginning of `control`.
std::span<std::byte> first_block(const File& file, IoQueue& queue, std::span<std::byte> control) {
  require(file.bytes() >= block_bytes, Code::bad_record, [&] {
    return Problem{.what = "cannot open the file: it is not a record file of Ballast", .where = file.path().string()};
  });
  const std::span<std::byte> block = control.first(block_bytes);
  queue.submit({IoKind::read, &file, 0, block}).wait();
  return block;
}

// Returns the newest first.
std::vector<Commit> sealed_commits(const RecordShape& shape, const File& file, IoQueue& queue,
                                   std::span<std::byte> control) {
  std::vector<Commit> sealed;
  for (const std::uint64_t slot : {0u, 1u}) {
    queue.submit({IoKind::read, &file, RecordPlaces::commit_offset(slot), control}).wait();
    const auto found = read_commit(shape, control);
    if (found.has_value() && found->generation > 0) sealed.push_back(*found);
  }
  std::ranges::sort(sealed, std::ranges::greater{}, &Commit::generation);
  return sealed;
}

}  // namespace

bool is_marked_damaged(const std::filesystem::path& records) {
  std::error_code unknown;
  return std::filesystem::exists(mark_of(records), unknown);
}

void mark_damaged(const std::filesystem::path& records) noexcept { std::ofstream(mark_of(records)); }

void remove_damage_mark(const std::filesystem::path& records) noexcept {
  std::error_code none_there;
  std::filesystem::remove(mark_of(records), none_there);
}

void PendingRead::check() const {
  try {
    wait_watched(completion_, log_, [&] { return fmt::format("the read of {}", known_.text(file_->path())); });
    known_.require_intact(record_, file_->path());
  } catch (const Error&) {
    if (is_kept_) mark_damaged(file_->path());
    throw;
  }
}

std::span<std::byte> PendingRead::payload() const {
  check();
  const bool whole = record_.size() >= block_bytes + known_.shape.payload_bytes;
  return record_.subspan(block_bytes, whole ? known_.shape.payload_bytes : known_.shape.first_bytes);
}

RecordStore::RecordStore(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options)
    : shape_(shape),
      places_(shape, drives.size()),
      is_kept_(options.file.writable && shape.places > 1),
      log_(options.log),
      control_(map_host_pages(commit_bytes, "control blocks of record files")),
      current_(shape.tiles),
      next_(shape.tiles),
      written_(shape.tiles) {
  require(!drives.empty() && shape.tiles > 0 && shape.first_bytes <= shape.payload_bytes, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot make records of {} tiles with {} bytes, {} of them first, on {} drives",
                                       shape.tiles, shape.first_bytes, shape.payload_bytes, drives.size()),
                   .needed = "at least one drive and one tile, and no more first bytes than a tile has"};
  });
}

RecordStore::RecordStore(RecordStore&&) noexcept = default;

RecordStore::~RecordStore() {
  if (newest_ == nullptr) return;  // moved-from
  finish();                        // writes that are not committed do not count
  for (const auto& stripe : stripes_) {
    stripe->queue->forget(stripe->file);
  }
}

void RecordStore::add(File file, IoQueue& queue) {
  stripes_.push_back(std::make_unique<Stripe>(Stripe{std::move(file), &queue}));
  const File& added = stripes_.back()->file;
  queue.remember(added);
  if (!added.direct() && log_ != nullptr) {
    log_->write_once(Level::warning, "buffered " + added.path().string(),
                     fmt::format("{} is written through the page cache, at a fraction of the drive's speed: {}",
                                 added.path().string(), added.buffered_because()));
  }
}

RecordStore RecordStore::create(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options) {
  std::vector<std::filesystem::path> paths;
  for (const Drive& drive : drives) {
    paths.push_back(options.path_in(drive.directory));
    require(!std::filesystem::exists(paths.back()), Code::file_call, [&] {
      return Problem{.what = "cannot make the records: there are some already, which are not overwritten",
                     .where = paths.back().string(),
                     .remedy = "open them to resume; otherwise remove them, or name another directory"};
    });
  }
  remove_unfinished(paths);
  const auto remove = [&](const void*) { remove_unfinished(paths); };  // unless the store is complete
  const std::unique_ptr<const void, decltype(remove)> cleanup(&paths, remove);
  RecordStore store(shape, drives, options);
  require_space(shape, directories_of(drives), 1);
  FileOptions with_name = options.file;
  with_name.create = true;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    store.add(File(unfinished(paths[i]), with_name), *drives[i].queue);
  }
  store.fill_with_zeros();
  for (std::size_t i = 0; i < drives.size(); ++i) {
    store.stripes_[i]->file.rename(paths[i]);
    flush_directory(drives[i].directory);
  }
  return store;
}

RecordStore RecordStore::scratch(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options) {
  RecordShape of_scratch = shape;
  of_scratch.places = 1;
  RecordStore store(of_scratch, drives, options);
  for (const Drive& drive : drives) {
    remove_stale_scratch(drive.directory);
  }
  require_space(of_scratch, directories_of(drives), 1);
  for (const Drive& drive : drives) {
    store.add(File::nameless(drive.directory, options.file), *drive.queue);
  }
  store.fill_with_zeros();
  return store;
}

// Writes zeros everywhere. Merely reserved extents would cost a third of the speed later, and a full drive is found
// here.
void RecordStore::fill_with_zeros() {
  for (std::size_t i = 0; i < stripes_.size(); ++i) {
    const Stripe& stripe = *stripes_[i];
    write_identity(shape_, {i, stripes_.size()}, control().first(block_bytes));
    stripe.queue->submit({IoKind::write, &stripe.file, 0, control().first(block_bytes)}).wait();
  }
  write_commit_record({});  // an empty commit in the slot of even generations
  const std::size_t bytes = record_bytes();
  const HostPages memory = map_host_pages((fill_depth + 1) * bytes, "first records");
  const std::span<std::byte> zeros{memory.get() + fill_depth * bytes, bytes};
  for (std::size_t begin = 0; begin < shape_.tiles; begin += fill_depth) {
    InFlight batch;
    for (std::size_t tile = begin; tile < std::min(begin + fill_depth, shape_.tiles); ++tile) {
      const Stripe& stripe = *stripes_[places_.file_of(tile)];
      batch.add(write(tile, {memory.get() + (tile - begin) * bytes, bytes}));
      if (!is_scratch()) {
        batch.add(stripe.queue->submit({IoKind::write, &stripe.file, places_.offset_of(tile, 0), zeros}));
      }
    }
    batch.wait();
  }
  commit(0);
}

// Bytes after a record's end belong to the next record.
void RecordStore::check(std::size_t tile, std::span<std::byte> record, std::size_t bytes) const {
  const bool aligned = reinterpret_cast<std::uintptr_t>(record.data()) % block_bytes == 0;
  require(tile < shape_.tiles && record.size() >= bytes && aligned, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot read or write tile {} with {} bytes at {}", tile, record.size(),
                                       static_cast<const void*>(record.data())),
                   .where = stripes_.front()->file.path().string(),
                   .needed = fmt::format("one of {} tiles, and {} bytes that begin at a multiple of {}", shape_.tiles,
                                         bytes, block_bytes)};
  });
}

PendingRead RecordStore::read(std::size_t tile, std::span<std::byte> record) const {
  return start_read(tile, record, record_bytes());
}

PendingRead RecordStore::read_first(std::size_t tile, std::span<std::byte> record) const {
  return start_read(tile, record, first_record_bytes());
}

PendingRead RecordStore::start_read(std::size_t tile, std::span<std::byte> record, std::size_t bytes) const {
  check(tile, record, bytes);
  const ChunkPlace place = place_of(tile);
  const Stripe& stripe = *stripes_[place.file];
  PendingRead read;
  read.known_ = *place.record;
  read.record_ = record.first(bytes);
  read.file_ = &stripe.file;
  read.is_kept_ = is_kept_;
  read.log_ = log_;
  read.completion_ = stripe.queue->submit({IoKind::read, &stripe.file, place.chunk.offset, read.record_});
  const std::lock_guard lock(*newest_);
  std::erase_if(reads_, [](const Completion& known) { return known.is_done(); });
  reads_.push_back(read.completion_);
  return read;
}

ChunkPlace RecordStore::place_of(std::size_t tile) const {
  const std::lock_guard lock(*newest_);
  const bool uncommitted = written_.at(tile).started;
  const RecordName name{tile, last_.generation + (uncommitted ? 1 : 0)};
  return {.file = places_.file_of(tile),
          .chunk = {places_.offset_of(tile, name.generation), block_bytes + shape_.payload_bytes, 0},
          .record = KnownRecord{shape_, name, (uncommitted ? next_ : current_)[tile]}};
}

Completion RecordStore::write(std::size_t tile, std::span<std::byte> record) {
  check(tile, record, record_bytes());
  require_known_state();
  if (written_[tile].started)
    settle(std::span(&written_[tile].completion, 1));  // two writes to one place are not ordered
  const RecordName name{tile, last_.generation + 1};
  const auto bytes = record.first(record_bytes());
  const Seals seals = seal_record(shape_, name, bytes);
  const Stripe& stripe = *stripes_[places_.file_of(tile)];
  Completion completion =
      stripe.queue->submit({IoKind::write, &stripe.file, places_.offset_of(tile, name.generation), bytes});
  const std::lock_guard lock(*newest_);
  next_[tile] = seals;
  written_[tile] = {true, completion};
  return completion;
}

void RecordStore::wait(const Completion& completion, std::string_view what) const {
  wait_watched(completion, log_, [&] { return fmt::format("{} of {}", what, stripes_.front()->file.path().string()); });
}

void RecordStore::commit(std::uint64_t step, std::span<const std::byte> note, const CommitLabel& label) {
  require_known_state();
  for (std::size_t tile = 0; tile < shape_.tiles; ++tile) {
    require(written_[tile].started, Code::out_of_order, [&] {
      return Problem{.what = "cannot commit: not all tiles of the generation are written",
                     .where = stripes_.front()->file.path().string(),
                     .needed = fmt::format("tile {}", tile)};
    });
    wait(written_[tile].completion, "a write");
  }
  const Commit next{.generation = last_.generation + 1,
                    .step = step,
                    .seals_hash = hash_of(next_),
                    .point = {counted_from_.incarnation, counted_from_.number + 1},
                    .note = {note.begin(), note.end()},
                    .label = label};
  require(note.size() <= max_note_bytes, Code::wrong_size, [&] {
    return Problem{.what = "cannot commit: the note does not fit into the commit record",
                   .needed = human_bytes(note.size()),
                   .available = human_bytes(max_note_bytes),
                   .remedy = "Keep them in a file of their own, and commit its name."};
  });
  if (!is_scratch()) make_durable(next);
  set_current(next);
}

// Its seals are in `next_`.
void RecordStore::set_current(const Commit& commit) {
  const std::lock_guard lock(*newest_);
  last_ = commit;
  counted_from_ = commit.point;
  current_.swap(next_);
  written_.assign(shape_.tiles, {});
}

// Order: flush the records on all drives, then write the commit record, then flush it. So at any moment one of the two
// commit slots names a generation with all its records on the drives.
void RecordStore::make_durable(const Commit& commit) {
  commit_failed_ = true;  // reset at the end
  flush();
  write_commit_record(commit);
  flush();
  commit_failed_ = false;
  warn_of_removed_files();
}

// This is no error: an open file stays usable, so the training is right until its process ends.
void RecordStore::warn_of_removed_files() const {
  for (const auto& stripe : stripes_) {
    if (log_ == nullptr || stripe->file.has_name()) continue;
    const std::string path = stripe->file.path().string();
    log_->write_once(Level::warning, "removed " + path,
                     fmt::format("{} has been removed while it is in use: no later start can resume from it. Save a "
                                 "checkpoint before this training ends.",
                                 path));
  }
}

void RecordStore::write_commit_record(const Commit& commit) {
  write_commit(shape_, commit, control());
  const Stripe& first = *stripes_.front();
  wait(first.queue->submit({IoKind::write, &first.file, RecordPlaces::commit_offset(commit.generation), control()}),
       "the commit");
}

void RecordStore::flush() {
  InFlight flushes;
  for (const auto& stripe : stripes_) {
    flushes.add(stripe->queue->submit({IoKind::flush, &stripe->file, 0, {}}));
  }
  flushes.wait();
}

void RecordStore::finish() {
  std::deque<Completion> reads;
  {
    const std::lock_guard lock(*newest_);
    reads.swap(reads_);
  }
  settle(reads);
  settle_writes();
}

void RecordStore::settle_writes() const { settle(written_, &Written::completion); }

void RecordStore::abandon() {
  settle_writes();
  if (is_scratch()) return;
  const std::lock_guard lock(*newest_);
  written_.assign(shape_.tiles, {});
}

// A failed flush is final. The drive may hold the new generation as the current one. Another write to the places that
// this object considers free would mix the two generations.
void RecordStore::require_known_state() const {
  require(!commit_failed_, Code::file_call, [&] {
    return Problem{.what = "cannot use the store: a commit has failed, and the drive may hold either generation",
                   .where = stripes_.front()->file.path().string(),
                   .remedy = "open the store again: that finds its newest committed generation"};
  });
}

RecordStore RecordStore::open(const RecordShape& shape, std::span<const Drive> drives, const StoreOptions& options) {
  RecordStore store(shape, drives, options);
  for (std::size_t i = 0; i < drives.size(); ++i) {
    store.add(File(options.path_in(drives[i].directory), options.file), *drives[i].queue);
    const Stripe& stripe = *store.stripes_[i];
    check_identity(shape, {i, drives.size()}, first_block(stripe.file, *stripe.queue, store.control()),
                   stripe.file.path());
    require(stripe.file.bytes() >= store.places_.file_bytes(i), Code::bad_record, [&] {
      return Problem{.what = "the file is cut off",
                     .where = stripe.file.path().string(),
                     .needed = fmt::format("{} bytes", store.places_.file_bytes(i)),
                     .available = fmt::format("{} bytes", stripe.file.bytes())};
    });
  }
  store.find_generation();
  return store;
}

std::optional<FoundRecords> RecordStore::look(std::span<const Drive> drives, const StoreOptions& options) {
  const std::filesystem::path path = options.path_in(drives.front().directory);
  if (!std::filesystem::exists(path)) return {};
  FileOptions unchanged = options.file;
  unchanged.writable = false;
  const File file(path, unchanged);
  const HostPages memory = map_host_pages(commit_bytes, "control blocks of record files");
  const std::span<std::byte> control{memory.get(), commit_bytes};
  IoQueue& queue = *drives.front().queue;
  const Identity identity = read_identity(first_block(file, queue, control), path);
  check_name(identity, {0, drives.size()}, path);
  FoundRecords found{.shape = identity.shape};
  const bool has_commits =
      file.bytes() >= RecordPlaces::commit_offset(1) + commit_bytes;  // else open() reports that the file is cut off
  if (!has_commits) return found;
  for (const Commit& commit : sealed_commits(found.shape, file, queue, control)) {
    found.commits.push_back({commit.point, commit.step, commit.label});
  }
  return found;
}

void RecordStore::find_generation() {
  const Stripe& first = *stripes_.front();
  const auto sealed = sealed_commits(shape_, first.file, *first.queue, control());
  const auto newest = std::ranges::find_if(sealed, [&](const Commit& each) { return load(each); });
  if (newest != sealed.end()) return set_current(*newest);
  fail(Code::bad_record, {.what = sealed.empty() ? "cannot open the record file: it holds no committed generation"
                                                 : "cannot open the record file: no generation has all its records",
                          .where = first.file.path().string()});
}

bool RecordStore::go_to(CommitPoint point) {
  if (last_.point == point) return true;
  const Stripe& first = *stripes_.front();
  for (const Commit& each : sealed_commits(shape_, first.file, *first.queue, control())) {
    if (each.point != point || !load(each)) continue;
    set_current(each);
    return true;
  }
  return false;
}

// Reads the head of every record, and keeps their seals in `next_`. Returns false if they differ from the committed
// ones.
bool RecordStore::load(const Commit& commit) {
  constexpr std::size_t at_once = commit_bytes / block_bytes;
  const auto head = [&](std::size_t i) { return control().subspan(i * block_bytes, block_bytes); };
  for (std::size_t begin = 0; begin < shape_.tiles; begin += at_once) {
    const std::size_t count = std::min(at_once, shape_.tiles - begin);
    InFlight reads;
    for (std::size_t i = 0; i < count; ++i) {
      const Stripe& stripe = *stripes_[places_.file_of(begin + i)];
      reads.add(
          stripe.queue->submit({IoKind::read, &stripe.file, places_.offset_of(begin + i, commit.generation), head(i)}));
    }
    reads.wait();
    for (std::size_t i = 0; i < count; ++i) {
      const HeadCheck found = check_head(shape_, {begin + i, commit.generation}, head(i));
      if (!found.problem.empty()) {
        log_unusable(commit, fmt::format("tile {}: {}", begin + i, found.problem));
        return false;
      }
      next_[begin + i] = found.seals;
    }
  }
  if (hash_of(next_) == commit.seals_hash) return true;
  log_unusable(commit, "its records are intact, but not all of them belong to the commit");
  return false;
}

// A step that did not end may have written over the generation before the current one.
void RecordStore::log_unusable(const Commit& commit, std::string_view reason) const {
  if (log_ == nullptr || commit.generation < last_.generation) return;
  log_->warning(fmt::format("{}: generation {} (step {}) cannot be used: {}", stripes_.front()->file.path().string(),
                            commit.generation, commit.step, reason));
}

}  // namespace ballast::offload
