#include "zero/engine/lanes.h"

#include "kernels/runtime/machine.h"
#include "kernels/runtime/system_resources.h"

namespace ballast {
namespace {

bool moves_data(Lane lane) { return lane != Lane::compute && lane != Lane::update && lane != Lane::host; }

}  // namespace

bool works_on_device(Lane lane) {
  switch (lane) {
    case Lane::gather:
    case Lane::reduce:
    case Lane::upload:
    case Lane::download:
    case Lane::update: return true;
    case Lane::compute:
    case Lane::host:
    case Lane::disk:
    case Lane::fetch: return false;
  }
  return false;
}

// Other ranks wait for its work.
static bool lets_ranks_wait(Lane lane) { return lane == Lane::gather || lane == Lane::reduce; }

GpuLanes::GpuLanes(int gpu) : gpu_(gpu) {
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    if (!works_on_device(static_cast<Lane>(lane))) continue;
    Stream stream(gpu, lets_ranks_wait(static_cast<Lane>(lane)) ? Stream::Priority::high : Stream::Priority::normal);
    auto backend = kernels::cuda_backend(stream.handle(), gpu);
    lanes_[lane] = OnGpu{std::move(stream), std::move(backend)};
  }
}

void GpuLanes::finish() const {
  for (const std::optional<OnGpu>& lane : lanes_) {
    if (lane) lane->stream.synchronize();
  }
}

LaneThread::LaneThread() : thread_(start_thread("a lane of the engine", [this] { run(); })) {}

LaneThread::~LaneThread() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  added_.notify_one();
  thread_.join();
}

offload::Completion LaneThread::add(std::function<void()> work) {
  Task task{std::move(work), {}};
  offload::Completion completion = task.promise.completion();
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  added_.notify_one();
  return completion;
}

void LaneThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    added_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      finish(task);
    }
    lock.lock();
  }
}

void LaneThread::finish(Task& task) {
  try {
    if (failed_) std::rethrow_exception(failed_);
    task.work();
  } catch (...) {
    failed_ = std::current_exception();
    task.promise.fail(failed_);
    return;
  }
  task.promise.finish();
}

LaneThreads::LaneThreads(const GpuLanes* gpu) {
  for (std::size_t i = 0; i < lane_count; ++i) {
    const Lane lane = static_cast<Lane>(i);
    if (lane == Lane::compute) continue;
    threads_[i] = std::make_unique<LaneThread>();
    if (moves_data(lane)) threads_[i]->add(use_short_time_slices).wait();
    if (gpu != nullptr) {  // also for lanes of the host: they wait for events, which CUDA does on the current GPU
      threads_[i]->add([number = gpu->gpu()] { device::choose_gpu(number); }).wait();
    }
  }
}

void LaneThreads::stop() {
  for (std::unique_ptr<LaneThread>& thread : threads_) {
    thread.reset();
  }
}

}  // namespace ballast
