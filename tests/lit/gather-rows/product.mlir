// CSR of any size times dense becomes kernel.gather_rows; all else is refused.
// RUN: gossamer-opt %s -p 'func.func(linalg-generalize-named-ops),linalg-fuse-elementwise-ops,fuse-epilogue,canonicalize,gather-rows{bits=256}' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @spmm(
// CHECK-NOT:     linalg
// CHECK:         %[[Y:.*]] = "kernel.gather_rows"(%{{.*}}, %{{.*}}) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      "kernel.yield"(%[[SUM]])
// CHECK-NEXT:    }) {ahead = 2 : i64, gathers = 0 : i64, lanes = 8 : i64, vectors = 13 : i64}
// CHECK:         return %[[Y]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  %y = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// By columns.
#CSC = #sparse_tensor.encoding<{map = (d0, d1) -> (d1 : dense, d0 : compressed)}>
func.func @csc(%a: tensor<?x?xf32, #CSC>, %x: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  // expected-error @unknown {{the rows schedule computes CSR x dense; here are}}
  %y = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSC>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// Narrow floats are summed in f32 and rounded at the end; a vector is one column.
// CHECK-LABEL: func.func @spmv(
// CHECK-NOT:     linalg
// CHECK:         "kernel.gather_rows"(%{{.*}}, %{{.*}}) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      %[[NARROW:.*]] = arith.truncf %[[SUM]] : f32 to bf16
// CHECK-NEXT:      "kernel.yield"(%[[NARROW]])
// CHECK-NEXT:    }) {ahead = 2 : i64, gathers = 0 : i64, lanes = 8 : i64, vectors = 13 : i64} : {{.*}} -> tensor<?xbf16>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#product = {indexing_maps = [affine_map<(i, k) -> (i, k)>, affine_map<(i, k) -> (k)>, affine_map<(i, k) -> (i)>], iterator_types = ["parallel", "reduction"]}
#each = {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
func.func @spmv(%a: tensor<?x?xbf16, #CSR>, %x: tensor<?xbf16>, %m: index) -> tensor<?xbf16> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m) : tensor<?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  %sums = linalg.generic #product ins(%a, %x : tensor<?x?xbf16, #CSR>, tensor<?xbf16>) outs(%start : tensor<?xf32>) {
  ^bb0(%v: bf16, %e: bf16, %sum: f32):
    %0 = arith.extf %v : bf16 to f32
    %1 = arith.extf %e : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %sum, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?xf32>
  %narrow = tensor.empty(%m) : tensor<?xbf16>
  %y = linalg.generic #each ins(%sums : tensor<?xf32>) outs(%narrow : tensor<?xbf16>) {
  ^bb0(%sum: f32, %old: bf16):
    %0 = arith.truncf %sum : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<?xbf16>
  return %y : tensor<?xbf16>
}

// -----

// The elementwise work on the product is its epilogue: tensors of its size, one number a row, a column, or for all.
// CHECK:       #[[ROW:.*]] = affine_map<(d0, d1) -> (d0, 0)>
// CHECK:       #[[COLUMN:.*]] = affine_map<(d0, d1) -> (d1)>
// CHECK:       #[[EACH:.*]] = affine_map<(d0, d1) -> (d0, d1)>
// CHECK-LABEL: func.func @epilogue(
// CHECK-SAME:    %[[A:[a-z0-9]*]]: {{[^,]*, [^,]*}}, %[[X:[a-z0-9]*]]: tensor<?x?xf32>, %[[R:[a-z0-9]*]]: tensor<?x?xf32>, %[[S:[a-z0-9]*]]: tensor<?x1xf32>, %[[B:[a-z0-9]*]]: tensor<?xf32>
// CHECK-NOT:     linalg
// CHECK:         "kernel.gather_rows"(%[[A]], %[[X]]) ({
// CHECK-NEXT:    ^bb0(%[[SUM:.*]]: f32):
// CHECK-NEXT:      "kernel.read"(%[[S]]) {map = #[[ROW]]}
// CHECK-NEXT:      "kernel.read"(%[[B]]) {map = #[[COLUMN]]}
// CHECK-NEXT:      "kernel.read"(%[[R]]) {map = #[[EACH]]}
// CHECK-NEXT:      arith.mulf %[[SUM]],
// CHECK-NEXT:      arith.addf
// CHECK-NEXT:      arith.maximumf
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#row = affine_map<(d0, d1) -> (d0, 0)>
#column = affine_map<(d0, d1) -> (d1)>
#each = affine_map<(d0, d1) -> (d0, d1)>
func.func @epilogue(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %r: tensor<?x?xf32>, %s: tensor<?x1xf32>, %b: tensor<?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  %sums = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  %scaled = linalg.generic {indexing_maps = [#each, #row, #column, #each], iterator_types = ["parallel", "parallel"]}
    ins(%sums, %s, %b : tensor<?x?xf32>, tensor<?x1xf32>, tensor<?xf32>) outs(%empty : tensor<?x?xf32>) {
  ^bb0(%sum: f32, %scale: f32, %bias: f32, %old: f32):
    %0 = arith.mulf %sum, %scale : f32
    %1 = arith.addf %0, %bias : f32
    linalg.yield %1 : f32
  } -> tensor<?x?xf32>
  %y = linalg.generic {indexing_maps = [#each, #each, #each], iterator_types = ["parallel", "parallel"]}
    ins(%scaled, %r : tensor<?x?xf32>, tensor<?x?xf32>) outs(%empty : tensor<?x?xf32>) {
  ^bb0(%in: f32, %residual: f32, %old: f32):
    %0 = arith.maximumf %in, %residual : f32
    linalg.yield %0 : f32
  } -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
