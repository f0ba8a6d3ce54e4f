#include "zero/engine/trainer_uses.h"

namespace ballast {

void TrainerUses::begin(const Op& op, OpStatus& status) {
  const Stream* const stream = trainer_.stream();
  const bool is_marked = stream != nullptr && (status.is_awaited || counters_.times_gpu());
  if (is_marked && !status.on_gpu) status.on_gpu = std::make_shared<GpuSpan>(stream->gpu(), counters_.times_gpu());
  if (status.on_gpu) {
    status.on_gpu->counted = false;
    status.on_gpu->mark_begin(*stream);
  }
  const Use& use = open_.emplace_back(Use{&op, &status, std::chrono::steady_clock::now(), status.on_gpu});
  status.in_stream = stream != nullptr;
  status.begun = use.promise.completion();
  status.is_free = false;
}

void TrainerUses::end(std::size_t number) {
  Use& ended = open_[number - first_];
  ended.ended = true;
  if (trainer_.stream() == nullptr) counters_.count(*ended.op, ended.begin, std::chrono::steady_clock::now());
  while (!open_.empty() && open_.front().ended) {
    if (open_.front().on_gpu) open_.front().on_gpu->end.record(*trainer_.stream());
    open_.front().status->is_free = true;
    open_.front().promise.finish();
    open_.pop_front();
    ++first_;
  }
}

}  // namespace ballast
