// The loops over a tile, and what is where in them.
// RUN: gossamer-opt %s -p 'expose-storage,lower-kblock,canonicalize,cse' --split-input-file | filecheck %s

// The innermost loops carry the sums of all tokens of a tile in registers: they load, multiply, add, and store nothing. Here
// a tile is two vectors of two tokens, and a long row takes two nonzeros at a time, each with sums of its own.
// CHECK-LABEL: func.func private @registers_tile4(
// CHECK:         scf.for %{{.*}} = %[[BEGIN:.*]] to %[[WHOLE:.*]] step %c2 iter_args(%[[A0:.*]] = %{{.*}}#0, %[[A1:.*]] = %{{.*}}#1, %[[B0:.*]] = %{{.*}}, %[[B1:.*]] = %{{.*}}) -> (vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>) {
// CHECK-COUNT-4:   vector.fma
// CHECK-NEXT:      scf.yield
// CHECK:         scf.for %[[P:.*]] = %[[WHOLE]] to %{{.*}} step %c1 iter_args(%[[S0:.*]] = %{{.*}}, %[[S1:.*]] = %{{.*}}) -> (vector<2xf32>, vector<2xf32>) {
// CHECK-NEXT:      %[[C:.*]] = memref.load %{{.*}}[%[[P]]] : memref<?xi16>
// CHECK-NEXT:      %[[COLUMN:.*]] = arith.index_castui %[[C]] : i16 to index
// CHECK-NEXT:      %[[K:.*]] = arith.addi %{{.*}}, %[[COLUMN]]
// CHECK-NEXT:      %[[W:.*]] = memref.load %{{.*}}[%[[P]]] : memref<?xf32>
// CHECK-NEXT:      %[[WS:.*]] = vector.broadcast %[[W]]
// CHECK-NEXT:      %[[X0:.*]] = vector.load %[[PACKED:.*]][%[[K]], %c0] : memref<30x4xf32>
// CHECK-NEXT:      %[[T0:.*]] = vector.fma %[[WS]], %[[X0]], %[[S0]]
// CHECK-NEXT:      %[[X1:.*]] = vector.load %[[PACKED]][%[[K]], %c2] : memref<30x4xf32>
// CHECK-NEXT:      %[[T1:.*]] = vector.fma %[[WS]], %[[X1]], %[[S1]]
// CHECK-NEXT:      scf.yield %[[T0]], %[[T1]]
// CHECK-NEXT:    }
// CHECK:         vector.store %{{.*}} : memref<4x4xf32>
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 16 : dense, d0 : dense, d1 mod 16 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @registers(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, #KB>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "kblock", tile = [4, 4, 16]} : (tensor<?x30xf32>, tensor<7x30xf32, #KB>) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// Four vectors of tokens: two nonzeros of a long row at a time make eight sums. There is a function for each width of tile.
// CHECK-LABEL: func.func private @wide_tile16(
// CHECK:         scf.for {{.*}} step %c2 iter_args(
// CHECK-COUNT-8:   vector.fma
// CHECK-NEXT:      scf.yield
// CHECK:         scf.for {{.*}} step %c1 iter_args({{.*}}) -> (vector<4xf32>, vector<4xf32>, vector<4xf32>, vector<4xf32>) {
// CHECK-COUNT-4:   vector.fma
// CHECK-NEXT:      scf.yield
// CHECK-LABEL: func.func private @wide_tile8(
// CHECK-LABEL: func.func private @wide_tile4(
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 16 : dense, d0 : dense, d1 mod 16 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @wide(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, #KB>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "kblock", tile = [16, 8, 16]} : (tensor<?x30xf32>, tensor<7x30xf32, #KB>) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// Positions are those of block x rows + row; the sums of a row start at zero in the first block, else at what is stored.
// CHECK-LABEL: func.func private @blocks_tile4(
// CHECK:         scf.for %[[PANEL:.*]] = %{{.*}} to %{{.*}} step %c2
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
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 16 : dense, d0 : dense, d1 mod 16 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @blocks(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, #KB>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "kblock", tile = [4, 4, 16]} : (tensor<?x30xf32>, tensor<7x30xf32, #KB>) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// One task a token tile, and more where threads would be idle: then the rows are shared out too (what is little work, the calling
// thread does alone). Each thread has its part of
// the workspace: 30 columns and 4 rows of 4 tokens, rounded up to cache lines, and one line between neighbours.
// CHECK:       module attributes {kernel.workspace = 640 : index}
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
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 16 : dense, d0 : dense, d1 mod 16 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @tasks(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, #KB>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "kblock", tile = [4, 4, 16]} : (tensor<?x30xf32>, tensor<7x30xf32, #KB>) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
