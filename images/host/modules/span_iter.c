// SPDX-License-Identifier: GPL-2.0
// The iterator over the gaps of an interval tree. The kernel has it only with IOMMUFD, in a file
// whose other functions it exports already.
#include <linux/compiler.h>
#include <linux/export.h>
#include <linux/interval_tree.h>
#include <linux/interval_tree_generic.h>

#undef EXPORT_SYMBOL_GPL
#define EXPORT_SYMBOL_GPL(symbol)
#include "interval_tree.c"
