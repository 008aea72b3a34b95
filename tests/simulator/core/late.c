#include "stream.h"
void ds_late_start(void) {}
