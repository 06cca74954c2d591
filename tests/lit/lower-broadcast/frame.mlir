// The frame around the loops of a product: blocks of columns, and tasks for threads.
// RUN: gossamer-opt %s -p 'expose-storage,lower-broadcast,canonicalize,cse' --split-input-file | filecheck %s

// Positions are those of block x rows + row; the sums of a row start at zero in the first block, else at what is stored.
// CHECK-LABEL: func.func private @blocks_tile4(
// CHECK:         scf.for %[[PANEL:.*]] = %{{.*}} to %{{.*}} step %c4
// CHECK:           scf.for %[[BLOCK:.*]] = %c0 to %c2 step %c1
// CHECK:             scf.for
// CHECK:               scf.for %[[ROW:.*]] =
// CHECK:                 %[[NEW:.*]] = arith.cmpi eq, %[[BLOCK]], %c0
// CHECK:                 scf.if %[[NEW]]
// CHECK-NEXT:              scf.yield %[[ZERO:.*]], %[[ZERO]]
// CHECK:                 else
// CHECK-NEXT:              vector.load
// CHECK:                 %[[FIRST:.*]] = arith.muli %[[BLOCK]], %c7
// CHECK:                 %[[AT:.*]] = arith.addi %[[FIRST]], %[[ROW]]
// CHECK:                 memref.load %{{.*}}[%[[AT]]] : memref<?xi32>
// CHECK:                 %[[NEXT:.*]] = arith.addi %[[AT]], %c1
// CHECK:                 memref.load %{{.*}}[%[[NEXT]]] : memref<?xi32>
func.func @blocks(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// One task a token tile, and more where threads would be idle: then the rows are shared out too (what is little work, the calling
// thread does alone). Each thread has its part of
// the workspace: 30 columns and 8 rows of 4 tokens, rounded up to cache lines, and one line between neighbours.
// CHECK:       module attributes {kernel.workspace = 704 : index}
// CHECK-LABEL: func.func @tasks(
// CHECK-SAME:    %[[OUT:[a-z0-9]*]]: memref<?x7xf32>, %[[SCRATCH:[a-z0-9]*]]: memref<?xi8>, %[[THREADS:[a-z0-9]*]]: index) {
// CHECK:         %[[T:.*]] = memref.dim %[[OUT]], %c0
// CHECK:         %[[TILES:.*]] = arith.ceildivui %[[T]], %c4
// CHECK:         %[[UNEVEN:.*]] = arith.cmpi ne
// CHECK:         %[[FEW:.*]] = arith.cmpi ult, %[[TILES]]
// CHECK:         %[[SHARE:.*]] = arith.andi %[[UNEVEN]], %[[FEW]]
// CHECK:         %[[WANTED:.*]] = arith.select %[[SHARE]], %[[THREADS]], %c1
// CHECK:         %[[CHUNKS:.*]] = arith.minui %[[WANTED]], %c4
// CHECK:         %[[TASKS:.*]] = arith.muli %[[TILES]], %[[CHUNKS]]
// CHECK:         scf.parallel (%[[TASK:.*]]) = (%c0) to (%[[TASKS]]) step (%c1) {
// CHECK:           call @omp_get_thread_num()
// CHECK:           %[[TILE:.*]] = arith.divui %[[TASK]], %[[CHUNKS]]
// CHECK:           %[[FIRST:.*]] = arith.muli %[[TILE]], %c4
// CHECK:           %[[LEFT:.*]] = arith.subi %[[T]], %[[FIRST]]
// CHECK:           %[[MANY:.*]] = arith.cmpi ugt, %[[LEFT]], %c2
// CHECK:           scf.if %[[MANY]]
// CHECK-NEXT:        call @tasks_tile4(
// CHECK:           else
// CHECK-NEXT:        call @tasks_tile2(
func.func @tasks(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
